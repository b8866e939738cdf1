"""Networks of sandboxes: a namespace each, rules, names, and one process that serves them all (the hub)."""
