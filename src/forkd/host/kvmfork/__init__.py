"""A VM's kernel objects made anew beneath a forked VMM. Knows KVM and nothing of a VMM.

    ioctls    KVM's requests: how long their arguments are, and what becomes of their effect     pure
    record    what made a VM, as the calls that make it once more                                pure
    fold      of all that was asked of a VM, what is in force                                    pure
    recorder  watches a VMM make a VM
    watch     ptrace's requests for that
    run_pages what a VMM shares with the kernel, and that nothing is under way in it             pure
    state     what a VM that stands still has in the kernel, read by calls of its own VMM
    msrs      which of its model-specific registers can be read and set here
    restore   the calls with which a duplicate of the VMM makes the VM anew, in that state       pure
    plan      all of it, as a plan to fork a process wants it

A KVM VM belongs to the process that made it: in a duplicate of that process its descriptors are dead. But a VMM
reaches it only through a few descriptors and one mapping for each vCPU. With new objects under the same numbers and at
the same addresses it does not notice. What cannot be carried over exactly is a reason not to fork. x86_64 Linux only.
"""
