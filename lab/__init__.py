"""The lab: a machine with KVM, root and a full cgroup v2, emulated by QEMU and forked from a snapshot for each run."""
