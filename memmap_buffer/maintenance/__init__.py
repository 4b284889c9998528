"""Work on whole folders: verify, repair, pack, publish, pull, snapshot, change the schema, statistics."""
