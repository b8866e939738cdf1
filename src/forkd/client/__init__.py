"""The SDK: requests without I/O, and the sync and async shells that send them. Nothing of the server is needed."""
