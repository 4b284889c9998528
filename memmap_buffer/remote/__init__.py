"""Packed folders at a URL, read through sparse local copies of them."""
