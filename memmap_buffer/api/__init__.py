"""The classes that users call: `ReplayBuffer`, `ConcatBuffer`, `Collector`."""
