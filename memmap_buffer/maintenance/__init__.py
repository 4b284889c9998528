"""Whole folders: verify, repair, pack, publish, pull, snapshot, change the schema, statistics."""
