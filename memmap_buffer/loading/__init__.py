"""Datasets, samplers, loaders, and the options of reading; read `batch_reader` first. Only here is PyTorch imported."""
