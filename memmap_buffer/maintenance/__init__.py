"""Whole folders: verify, repair, pack, snapshot, change the schema, statistics."""
