"""Forking another process, threads and all: a duplicate that has not run yet, set up by its own system calls.

    program       machine code that makes system calls and stores their results      pure
    registers     what a thread was doing, and how it does it again                  pure
    mappings      /proc/<pid>/maps: where code fits, what could not be duplicated    pure
    descriptors   what is open, and the calls that open it anew                      pure
    shared_memory memory files that it maps for itself alone, and the calls for others
    seed_page     code and room of a thread that makes calls for us                  pure
    blueprint     all that a child does before it runs                               pure
    ptrace        the kernel's calls, one function each
    proc_files    what is open, as /proc has it
    rest          a process is stopped where all its threads wait, and let go
    source        the process that is forked: it makes calls for us, and forks itself
    seed          planting one, and finding it again
    child         its duplicate: descriptors, set-up, threads, and let go

Everything that happens to the source happens in code that goes on by itself: a tracer that is killed at whatever
instruction leaves the source running as it was, and no child. x86_64 Linux only.
"""
