"""How bytes become durable: the format, one folder open, and its one writer."""
