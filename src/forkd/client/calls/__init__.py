"""The daemon's routes as functions that build a Call, by noun. docs/rest.md is the contract."""
