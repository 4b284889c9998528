"""Datasets, samplers and loaders, and the options that they take. PyTorch is imported from here on."""
