"""A tiny VMM to be forked: its main thread rests in poll, and each vCPU has a thread. It answers over descriptor 0.

Run as `python -I -S vmm.py`. The guest is in real mode: each vCPU counts in a word of its own; the first one tells so
to an ioeventfd, too, and counts interrupts, which come by an irqfd. Standard library only.
"""

import ctypes
import fcntl
import mmap
import os
import select
import signal
import socket
import struct
import threading

CREATE_VM, CREATE_VCPU, CREATE_IRQCHIP, CREATE_PIT2 = 0xAE01, 0xAE41, 0xAE60, 0x4040AE77
SET_MEMORY, SET_TSS, SET_IDENTITY = 0x4020AE46, 0xAE47, 0x4008AE48
IRQFD, IOEVENTFD, RUN, MMAP_SIZE = 0x4020AE76, 0x4040AE79, 0xAE80, 0xAE04
SUPPORTED_CPUID, SET_CPUID2 = 0xC008AE05, 0x4008AE90
GET_REGS, SET_REGS, GET_SREGS, SET_SREGS = 0x8090AE81, 0x4090AE82, 0x8138AE83, 0x4138AE84
SET_MP_STATE, GET_MSRS, SET_MSRS = 0x4004AE99, 0xC008AE88, 0x4008AE89
GET_IRQCHIP, SET_IRQCHIP = 0xC208AE62, 0x8208AE63
# What describes a vCPU at rest, and stays as it is while it rests: request and size.
STATE = {
    "mp_state": (0x8004AE98, 4),
    "regs": (GET_REGS, 144),
    "sregs": (GET_SREGS, 312),
    "xsave": (0x9000AEA4, 4096),
    "xcrs": (0x8188AEA6, 392),
    "debugregs": (0x8080AEA1, 128),
    "lapic": (0x8400AE8E, 1024),
    "events": (0x8040AE9F, 64),
}
SET_STATE = {
    "mp_state": SET_MP_STATE,
    "xcrs": 0x4188AEA7,
    "debugregs": 0x4080AEA2,
    "xsave": 0x5000AEA5,
    "events": 0x4040AEA0,
}
MEMORY_BYTES = 2 << 20
CODE, COUNTERS, INTERRUPTS, STACKS = 0x1000, 0x2000, 0x2800, 0x8000
NOTIFY_PORT, LINE, HANDLER = 0x510, 5, 0x1800
PORT, DEASSIGN = 2, 4


libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]


def map_shared(fd, size):
    """Without the second descriptor that Python's mmap keeps."""
    address = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    return (ctypes.c_ubyte * size).from_address(address)


class Vmm:
    def __init__(self, vcpus):
        self.kvm = os.open("/dev/kvm", os.O_RDWR | os.O_CLOEXEC)
        self.memory = mmap.mmap(-1, MEMORY_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.vm = fcntl.ioctl(self.kvm, CREATE_VM, 0)
        fcntl.ioctl(self.vm, SET_TSS, 0x7FFBD000)
        fcntl.ioctl(self.vm, SET_IDENTITY, struct.pack("<Q", 0x7FFBC000))
        fcntl.ioctl(self.vm, CREATE_IRQCHIP, 0)
        fcntl.ioctl(self.vm, CREATE_PIT2, bytes(64))
        host = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        # Twice, as a VMM that changes its mind.
        fcntl.ioctl(self.vm, SET_MEMORY, struct.pack("<IIQQQ", 0, 0, 0, MEMORY_BYTES // 2, host))
        fcntl.ioctl(self.vm, SET_MEMORY, struct.pack("<IIQQQ", 0, 0, 0, 0, host))
        fcntl.ioctl(self.vm, SET_MEMORY, struct.pack("<IIQQQ", 0, 0, 0, MEMORY_BYTES, host))
        self.line, self.notified = os.eventfd(0, os.EFD_NONBLOCK), os.eventfd(0, os.EFD_NONBLOCK)
        fcntl.ioctl(self.vm, IRQFD, struct.pack("<IIII16x", self.line, LINE, 0, 0))
        self.start_notifying()
        self.notifications = 0
        self.write_guest()
        self.set_up_interrupts()
        self.vcpus = [Vcpu(self, number) for number in range(vcpus)]

    def start_notifying(self):
        fcntl.ioctl(self.vm, IOEVENTFD, struct.pack("<QQIiI36x", 0, NOTIFY_PORT, 1, self.notified, PORT))

    def stop_notifying(self):
        fcntl.ioctl(self.vm, IOEVENTFD, struct.pack("<QQIiI36x", 0, NOTIFY_PORT, 1, self.notified, PORT | DEASSIGN))

    def add_memory(self, flags):
        self.more = mmap.mmap(-1, MEMORY_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        host = ctypes.addressof(ctypes.c_char.from_buffer(self.more))
        fcntl.ioctl(self.vm, SET_MEMORY, struct.pack("<IIQQQ", 1, flags, MEMORY_BYTES, MEMORY_BYTES, host))

    def remove_memory(self):
        fcntl.ioctl(self.vm, SET_MEMORY, struct.pack("<IIQQQ", 1, 0, MEMORY_BYTES, 0, 0))

    def write_guest(self):
        count_and_tell = bytes.fromhex("fb") + bytes.fromhex(
            "66ff07 ee ebfa"
        )  # sti; 1: inc dword [bx]; out dx, al; jmp 1b
        self.memory[CODE : CODE + len(count_and_tell)] = count_and_tell
        count = bytes.fromhex("66ff07 ebfb")
        self.memory[CODE + 0x100 : CODE + 0x100 + len(count)] = count
        # push ax; inc dword [INTERRUPTS]; mov al, 0x20; out 0x20, al; pop ax; iret
        handler = bytes.fromhex("50 66ff06") + struct.pack("<H", INTERRUPTS) + bytes.fromhex("b020 e620 58 cf")
        self.memory[HANDLER : HANDLER + len(handler)] = handler
        self.memory[(0x20 + LINE) * 4 : (0x20 + LINE) * 4 + 4] = struct.pack("<HH", HANDLER, 0)

    def set_up_interrupts(self):
        """The first interrupt controller, as if the guest had programmed it: vectors from 0x20 on, one line open."""
        chip = bytearray(520)
        fcntl.ioctl(self.vm, GET_IRQCHIP, chip, True)
        chip[8 + 2] = 0xFF & ~(1 << LINE)  # imr
        chip[8 + 5] = 0x20  # irq_base
        fcntl.ioctl(self.vm, SET_IRQCHIP, chip, True)

    def word(self, address):
        return struct.unpack_from("<I", self.memory, address)[0]

    def notice(self):
        try:
            self.notifications += os.eventfd_read(self.notified)
        except BlockingIOError:
            pass

    def pause(self):
        for vcpu in self.vcpus:
            vcpu.pause()

    def resume(self):
        for vcpu in self.vcpus:
            vcpu.may_run.set()

    def peek(self):
        self.notice()
        return {
            "counts": [self.word(COUNTERS + 16 * vcpu.number) for vcpu in self.vcpus],
            "interrupts": self.word(INTERRUPTS),
            "notifications": self.notifications,
            "exits": [vcpu.strange for vcpu in self.vcpus],
        }

    def dump(self):
        chips = []
        for number in range(3):
            chip = bytearray(520)
            struct.pack_into("<I", chip, 0, number)
            fcntl.ioctl(self.vm, GET_IRQCHIP, chip, True)
            chips.append(chip.hex())
        return {"chips": chips, "vcpus": [vcpu.dump() for vcpu in self.vcpus]}

    def times(self):
        """Of all vCPUs, at once as nearly as can be."""
        return [vcpu.msr(0x10) for vcpu in self.vcpus]


class Vcpu:
    def __init__(self, vmm, number):
        self.number = number
        self.fd = fcntl.ioctl(vmm.vm, CREATE_VCPU, number)
        self.shared = map_shared(self.fd, fcntl.ioctl(vmm.kvm, MMAP_SIZE, 0))
        cpuid = bytearray(8 + 40 * 256)
        struct.pack_into("<I", cpuid, 0, 256)
        fcntl.ioctl(vmm.kvm, SUPPORTED_CPUID, cpuid, True)
        fcntl.ioctl(self.fd, SET_CPUID2, cpuid, True)
        sregs = bytearray(312)
        fcntl.ioctl(self.fd, GET_SREGS, sregs, True)
        struct.pack_into("<Q", sregs, 0, 0)  # the code segment's base
        struct.pack_into("<H", sregs, 12, 0)  # and selector
        fcntl.ioctl(self.fd, SET_SREGS, sregs, True)
        regs = [0] * 18
        regs[1], regs[3], regs[6] = COUNTERS + 16 * number, NOTIFY_PORT, STACKS + 0x100 * (number + 1)
        regs[16], regs[17] = CODE + (0x100 if number else 0), 2
        regs[8] = 0x1000 + number  # r8 to r15 stay as they are
        fcntl.ioctl(self.fd, SET_REGS, struct.pack("<18Q", *regs))
        fcntl.ioctl(self.fd, SET_MP_STATE, struct.pack("<I", 0))
        self.strange = 0
        self.may_run, self.rests = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()
        self.rests.wait()

    def run(self):
        while True:
            self.rests.set()
            self.may_run.wait()
            try:
                fcntl.ioctl(self.fd, RUN, 0)
                self.strange = struct.unpack_from("<I", self.shared, 8)[0]
                self.may_run.clear()
            except InterruptedError:
                self.shared[1] = 0

    def pause(self):
        self.rests.clear()
        self.may_run.clear()
        self.shared[1] = 1
        signal.pthread_kill(self.thread.ident, signal.SIGUSR1)
        self.rests.wait()
        self.shared[1] = 0

    def dump(self):
        found = {}
        for name, (request, size) in STATE.items():
            data = bytearray(size)
            fcntl.ioctl(self.fd, request, data, True)
            found[name] = data.hex()
        return found

    def set(self, name, data):
        fcntl.ioctl(self.fd, SET_STATE[name], bytearray(data), True)

    def msr(self, index):
        data = bytearray(struct.pack("<IIIIQ", 1, 0, index, 0, 0))
        assert fcntl.ioctl(self.fd, GET_MSRS, data, True) == 1
        return struct.unpack_from("<Q", data, 16)[0]

    def set_msr(self, index, value):
        assert fcntl.ioctl(self.fd, SET_MSRS, bytearray(struct.pack("<IIIIQ", 1, 0, index, 0, value)), True) == 1


def main():
    signal.signal(signal.SIGUSR1, lambda *_: None)
    control = socket.socket(fileno=0)
    poll = select.poll()
    poll.register(0, select.POLLIN)
    names = {**globals()}
    while True:
        poll.poll()
        code = control.recv(1 << 16).decode()
        if not code:
            return
        try:
            try:
                answer = repr(eval(compile(code, "<asked>", "eval"), names))
            except SyntaxError:
                exec(code, names)  # noqa: S102
                answer = "None"
        except Exception as error:
            answer = "!" + repr(error)
        control.send(answer.encode())


main()
