/* A tiny VM, forked as often as it is told to: by itself, with the system calls that a fork takes, or by forkd.
 *
 *   primitive native N   forks N times by itself: all at once, and then N times one after the other
 *   primitive serve      makes the VM when a byte arrives on descriptor 0, and waits to be forked
 *
 * Both write a struct tick to descriptor 1 for each VM whose guest was seen to run. The guest counts a word and tells so
 * by an output, once in the source and once in each fork, and then sleeps for ever.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <linux/kvm.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MEMORY_BYTES (2 << 20)
#define MOST_MSRS 1024
#define MOST_CPUID 256

struct tick {
	int64_t pid, began_ns, ran_ns, count;
};
/* Of "serve", when all is ready, the same with the address of `go` in place of began_ns. */

static int kvm, vm, vcpu;
static struct kvm_run *run;
static size_t run_bytes;
static uint8_t *memory;
/* Set to 1 in a fork, in the one by forkd from outside. */
static uint32_t go;
static int64_t began_ns;

static struct {
	struct kvm_mp_state mp_state;
	struct kvm_regs regs;
	struct kvm_sregs sregs;
	struct kvm_xsave xsave;
	struct kvm_xcrs xcrs;
	struct kvm_debugregs debugregs;
	struct kvm_lapic_state lapic;
	struct kvm_vcpu_events events;
	struct kvm_irqchip chips[3];
	struct kvm_pit_state2 pit;
	struct kvm_clock_data clock;
	struct {
		struct kvm_msrs head;
		struct kvm_msr_entry entries[MOST_MSRS];
	} msrs;
	struct {
		struct kvm_cpuid2 head;
		struct kvm_cpuid_entry2 entries[MOST_CPUID];
	} cpuid;
} state;

static void die(const char *what)
{
	fprintf(stderr, "%s: %s\n", what, strerror(errno));
	_exit(1);
}

static int call(int fd, unsigned long request, void *argument, const char *what)
{
	int value = ioctl(fd, request, argument);

	if (value < 0)
		die(what);
	return value;
}
#define CALL(fd, request, argument) call(fd, request, (void *)(uintptr_t)(argument), #request)

static int64_t now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000000000ll + now.tv_nsec;
}

static void make_vm(void)
{
	uint64_t identity = 0x7ffbc000;
	struct kvm_pit_config pit = {0};
	struct kvm_userspace_memory_region region = {
		.memory_size = MEMORY_BYTES, .userspace_addr = (uintptr_t)memory};

	vm = CALL(kvm, KVM_CREATE_VM, 0);
	CALL(vm, KVM_SET_TSS_ADDR, 0x7ffbd000);
	CALL(vm, KVM_SET_IDENTITY_MAP_ADDR, &identity);
	CALL(vm, KVM_SET_USER_MEMORY_REGION, &region);
	CALL(vm, KVM_CREATE_IRQCHIP, 0);
	CALL(vm, KVM_CREATE_PIT2, &pit);
	vcpu = CALL(vm, KVM_CREATE_VCPU, 0);
}

static void write_guest(void)
{
	/* 1: inc dword [bx]; out dx, al; inc dword [bx]; out dx, al; 2: hlt; jmp 2b */
	static const uint8_t code[] = {0x66, 0xff, 0x07, 0xee, 0x66, 0xff, 0x07, 0xee, 0xf4, 0xeb, 0xfd};
	struct kvm_regs regs = {.rip = 0x1000, .rbx = 0x2000, .rdx = 0x510, .rflags = 2};

	memcpy(memory + 0x1000, code, sizeof code);
	state.cpuid.head.nent = MOST_CPUID;
	CALL(kvm, KVM_GET_SUPPORTED_CPUID, &state.cpuid);
	CALL(vcpu, KVM_SET_CPUID2, &state.cpuid);
	CALL(vcpu, KVM_GET_SREGS, &state.sregs);
	state.sregs.cs.base = state.sregs.cs.selector = 0;
	CALL(vcpu, KVM_SET_SREGS, &state.sregs);
	CALL(vcpu, KVM_SET_REGS, &regs);
}

static void map_run(int at_old_place)
{
	int flags = MAP_SHARED | (at_old_place ? MAP_FIXED : 0);

	run = mmap(run, run_bytes, PROT_READ | PROT_WRITE, flags, vcpu, 0);
	if (run == MAP_FAILED)
		die("mmap");
}

static void run_to_output(void)
{
	while (ioctl(vcpu, KVM_RUN, 0) < 0)
		if (errno != EINTR)
			die("KVM_RUN");
	if (run->exit_reason != KVM_EXIT_IO) {
		fprintf(stderr, "the guest ended by %u\n", run->exit_reason);
		_exit(1);
	}
}

/* To its first output, and behind it. */
static void begin_guest(void)
{
	run_to_output();
	run->immediate_exit = 1;
	if (ioctl(vcpu, KVM_RUN, 0) != -1 || errno != EINTR)
		die("KVM_RUN that ends at once");
	run->immediate_exit = 0;
	run->exit_reason = KVM_EXIT_INTR; /* as nothing is left of the output, which cannot be seen otherwise */
}

static void *run_guest(void *unused)
{
	struct tick tick;

	while (__atomic_load_n(&go, __ATOMIC_ACQUIRE) == 0)
		syscall(SYS_futex, &go, FUTEX_WAIT_BITSET_PRIVATE, 0, NULL, NULL, FUTEX_BITSET_MATCH_ANY);
	run_to_output();
	tick = (struct tick){getpid(), began_ns, now_ns(), *(uint32_t *)(memory + 0x2000)};
	if (write(1, &tick, sizeof tick) != sizeof tick)
		_exit(1);
	for (;;)
		ioctl(vcpu, KVM_RUN, 0);
	return unused;
}

static void start_vcpu(void)
{
	pthread_attr_t attributes;
	pthread_t thread;

	pthread_attr_init(&attributes);
	pthread_attr_setstacksize(&attributes, 65536);
	if (pthread_create(&thread, &attributes, run_guest, NULL))
		die("pthread_create");
}

static void wait_for_ever(void)
{
	for (;;)
		syscall(SYS_ppoll, NULL, 0, NULL, NULL, 0);
}

static void save(void)
{
	struct {
		struct kvm_msr_list head;
		uint32_t indices[MOST_MSRS];
	} list = {.head.nmsrs = MOST_MSRS};
	int count, left;

	CALL(vcpu, KVM_GET_MP_STATE, &state.mp_state);
	CALL(vcpu, KVM_GET_REGS, &state.regs);
	CALL(vcpu, KVM_GET_SREGS, &state.sregs);
	CALL(vcpu, KVM_GET_XSAVE, &state.xsave);
	CALL(vcpu, KVM_GET_LAPIC, &state.lapic);
	state.cpuid.head.nent = MOST_CPUID;
	CALL(vcpu, KVM_GET_CPUID2, &state.cpuid);
	CALL(kvm, KVM_GET_MSR_INDEX_LIST, &list);
	left = list.head.nmsrs;
	for (int at = 0; at < left; at++)
		state.msrs.entries[at].index = list.indices[at];
	for (;;) {
		state.msrs.head.nmsrs = left;
		count = CALL(vcpu, KVM_GET_MSRS, &state.msrs);
		if (count == left)
			break;
		state.msrs.entries[count] = state.msrs.entries[--left];
	}
	for (int chip = 0; chip < 3; chip++) {
		state.chips[chip].chip_id = chip;
		CALL(vm, KVM_GET_IRQCHIP, &state.chips[chip]);
	}
	CALL(vm, KVM_GET_PIT2, &state.pit);
	CALL(vm, KVM_GET_CLOCK, &state.clock);
	state.clock.flags = 0;
}

/* What a fork does, natively. */
static void restore(void)
{
	int old_vm = vm, old_vcpu = vcpu;

	close(old_vm);
	close(old_vcpu);
	make_vm();
	map_run(1);
	CALL(vcpu, KVM_SET_CPUID2, &state.cpuid);
	CALL(vcpu, KVM_SET_SREGS, &state.sregs);
	CALL(vcpu, KVM_SET_XSAVE, &state.xsave);
	CALL(vcpu, KVM_SET_REGS, &state.regs);
	CALL(vcpu, KVM_SET_LAPIC, &state.lapic);
	CALL(vcpu, KVM_SET_MSRS, &state.msrs);
	for (int chip = 0; chip < 3; chip++)
		CALL(vm, KVM_SET_IRQCHIP, &state.chips[chip]);
	CALL(vm, KVM_SET_PIT2, &state.pit);
	CALL(vm, KVM_SET_CLOCK, &state.clock);
}

static pid_t fork_once(void)
{
	pid_t pid;

	began_ns = now_ns();
	pid = fork();
	if (pid < 0)
		die("fork");
	if (pid == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		restore();
		go = 1;
		start_vcpu();
		wait_for_ever();
	}
	return pid;
}

static void take(int from, int to)
{
	struct tick tick;

	if (read(from, &tick, sizeof tick) != sizeof tick || write(to, &tick, sizeof tick) != sizeof tick)
		die("tick");
}

static void end_all(pid_t *pids, int count)
{
	for (int at = 0; at < count; at++)
		kill(pids[at], SIGKILL);
	for (int at = 0; at < count; at++)
		waitpid(pids[at], NULL, 0);
}

static void fork_many(int count)
{
	pid_t *pids = calloc(count, sizeof *pids);
	int ends[2], out = dup(1);

	if (!pids || pipe(ends) || dup2(ends[1], 1) < 0)
		die("prepare");
	for (int at = 0; at < count; at++)
		pids[at] = fork_once();
	for (int at = 0; at < count; at++)
		take(ends[0], out);
	end_all(pids, count);
	for (int at = 0; at < count; at++) {
		pids[at] = fork_once();
		take(ends[0], out);
	}
	end_all(pids, count);
}

int main(int argc, char **argv)
{
	char byte;
	int serve = argc == 2 && !strcmp(argv[1], "serve");

	if (!serve && !(argc == 3 && !strcmp(argv[1], "native")))
		return 2;
	if (serve && read(0, &byte, 1) != 1)
		return 1;
	kvm = open("/dev/kvm", O_RDWR | O_CLOEXEC);
	if (kvm < 0)
		die("/dev/kvm");
	run_bytes = CALL(kvm, KVM_GET_VCPU_MMAP_SIZE, 0);
	memory = mmap(NULL, MEMORY_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (memory == MAP_FAILED)
		die("mmap");
	make_vm();
	map_run(0);
	write_guest();
	begin_guest();
	if (serve) {
		start_vcpu();
		struct tick ready = {getpid(), (intptr_t)&go, 0, *(uint32_t *)(memory + 0x2000)};

		if (write(1, &ready, sizeof ready) != sizeof ready)
			die("ready");
		wait_for_ever();
	}
	save();
	fork_many(atoi(argv[2]));
	return 0;
}
