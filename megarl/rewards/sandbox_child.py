"""What runs inside the sandbox: `python sandbox_child.py JOB_FD`. It locks itself in for good, then runs the program.

The filter of system calls lists what is allowed, not what is denied: so a call that nobody thought of, or that a later
kernel adds, is refused too. The list is short, as it is what CPython, glibc's allocator and threads, and numpy need.
All others fail with ENOSYS, which has glibc take an older call where it knows one (clone3). Arguments are looked at
where a call has dangerous ones: `open` is for reading only, `clone` for threads only, no `fcntl` has signals sent to
others (F_SETOWN), no `ioctl` changes the attributes of files.
This file imports nothing of the project and nothing heavy: each test of a program pays for its start.
"""

import builtins
import ctypes
import errno
import marshal
import os
import resource
import signal
import struct
import sys
import types

READY = b"ready"

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38  # linux/prctl.h
CAPABILITY_VERSION_3 = 0x20080522  # linux/capability.h

# linux/landlock.h, and its calls in asm/unistd_64.h
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
RULESET_VERSION, RULE_PATH_BENEATH = 1, 1
READ_FILE, READ_DIR = 1 << 2, 1 << 3
ALL_ACCESS = (1 << 13) - 1  # what the first version can deny: later ones deny it as well

# linux/seccomp.h, linux/audit.h, linux/bpf_common.h
MODE_FILTER = 2
KILL_PROCESS, ALLOW, REFUSE = 0x80000000, 0x7FFF0000, 0x00050000 | errno.ENOSYS
ARCH_X86_64 = 0xC000003E
LOAD, JUMP_EQUAL, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06
NUMBER_OFFSET, ARCH_OFFSET, ARGUMENTS_OFFSET = 0, 4, 16  # of struct seccomp_data

# asm/unistd_64.h. Numbers of the x32 ABI have bit 30 set, so none of them is here.
ALLOWED = {
    "read": 0, "write": 1, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "poll": 7, "lseek": 8, "mmap": 9,
    "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15,
    "pread64": 17, "pwrite64": 18, "readv": 19, "writev": 20, "access": 21, "select": 23, "sched_yield": 24,
    "mremap": 25, "madvise": 28, "dup": 32, "dup2": 33, "nanosleep": 35, "getpid": 39, "exit": 60, "uname": 63,
    "getcwd": 79, "readlink": 89, "gettimeofday": 96, "getrusage": 98, "sysinfo": 99, "times": 100,
    "getuid": 102, "getgid": 104, "geteuid": 107, "getegid": 108, "getppid": 110, "sigaltstack": 131,
    "gettid": 186, "time": 201, "futex": 202, "sched_getaffinity": 204, "getdents64": 217,
    "restart_syscall": 219, "clock_gettime": 228, "clock_getres": 229, "clock_nanosleep": 230,
    "exit_group": 231, "newfstatat": 262, "readlinkat": 267, "faccessat": 269, "pselect6": 270, "ppoll": 271,
    "set_robust_list": 273, "dup3": 292, "getrandom": 318, "statx": 332, "rseq": 334, "faccessat2": 439,
}  # fmt: skip
READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | 0x8000  # large
OPEN_FLAGS = {2: 1, 257: 2}  # open, openat: which argument may have no other flags than those
VALUES = {  # number: (which argument, its allowed values)
    16: (1, (0x5401, 0x5451)),  # ioctl: TCGETS of isatty, FIOCLEX
    56: (0, (0x3D0F00,)),  # clone: the flags of glibc's pthread_create; fork's are others
    72: (1, (0, 1, 2, 3, 1030)),  # fcntl: F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC
}

libc = ctypes.CDLL(None, use_errno=True)


def main(job_fd: int) -> None:
    with open(job_fd, "rb") as file:
        job = marshal.load(file)
    devnull = os.open(os.devnull, os.O_WRONLY)
    lock_in(job)
    sys.path += job["packages"]
    sys.argv = ["solution.py"]
    builtins.exit = builtins.quit = sys.exit  # of `site`, which is not loaded
    name = "__main__" if job["calls"] is None else "solution"  # what is only for __main__ is not for calls
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(job["prelude"], "prelude.py", "exec"), module.__dict__)
    os.write(2, READY)
    os.dup2(devnull, 2)
    os.close(devnull)
    if job["calls"] is not None:
        answers = os.dup(1)
        os.dup2(2, 1)
    exec(compile(job["code"], "solution.py", "exec"), module.__dict__)
    if job["calls"] is not None:
        answer_calls(module.__dict__, job["calls"], answers)
        os._exit(0)


def answer_calls(namespace: dict, calls: list, answers: int) -> None:
    """Write a line per call: the canonical text of its value, or nothing where it has none."""
    for expression, arguments, as_json in calls:
        try:
            line = canonical(evaluate(namespace, expression, arguments), as_json)
        except BaseException:  # of the model's code, SystemExit included: no answer to this call
            line = ""
        os.write(answers, line.encode() + b"\n")


def evaluate(namespace: dict, expression: str, arguments: list | None) -> object:
    """The value of an expression, or with arguments that of the function it names, which may be one of LeetCode's
    `class Solution`."""
    if arguments is None:
        return eval(expression, namespace)
    if "Solution" in namespace:
        return getattr(namespace["Solution"](), expression)(*arguments)
    return namespace[expression](*arguments)


def canonical(value: object, as_json: bool) -> str:
    """A line of text that is the same for values that are equal in Python, whatever their types, as 1, 1.0 and True.

    `as_json`: as JSON has it, tuples are lists and keys are strings. Subclasses count as what they inherit from,
    numpy's arrays and scalars as lists and numbers. Raises ValueError for a NaN, which equals nothing, and TypeError
    for what is none of None, number, string, bytes, list, tuple, set and dict.
    """
    if value is None:
        return "None"
    if isinstance(value, int):
        return hex(value)
    if isinstance(value, float):
        if value != value:
            raise ValueError("a NaN equals nothing")
        return hex(int(value)) if value.is_integer() else float.__repr__(value)
    if isinstance(value, complex):
        real, imaginary = canonical(value.real, as_json), canonical(value.imag, as_json)
        return f"{real}+{imaginary}j" if value.imag else real
    if isinstance(value, str):
        return ascii(str(value))
    if isinstance(value, bytes | bytearray):
        return repr(bytes(value))
    if isinstance(value, list) or (as_json and isinstance(value, tuple)):
        return f"[{','.join(canonical(item, as_json) for item in value)}]"
    if isinstance(value, tuple):
        return f"({','.join(canonical(item, as_json) for item in value)})"
    if isinstance(value, set | frozenset):
        return f"set({','.join(sorted(canonical(item, as_json) for item in value))})"
    if isinstance(value, dict):
        pairs = ((str(key) if as_json else key, item) for key, item in value.items())
        return f"{{{','.join(sorted(f'{canonical(key, as_json)}:{canonical(item, as_json)}' for key, item in pairs))}}}"
    if hasattr(value, "tolist"):
        return canonical(value.tolist(), as_json)
    raise TypeError(f"a value of type {type(value).__name__} cannot be compared")


def lock_in(job: dict) -> None:
    """Limits, no privileges, files to read, system calls: in this order, as each takes away what the one before needs.

    Raises OSError where the kernel refuses one of them.
    """
    for limit, value in job["limits"].items():
        resource.setrlimit(getattr(resource, limit), (value, value))
    prctl(PR_SET_DUMPABLE, 0)  # no core file: RLIMIT_CORE does not hold for one that goes to a program, see core(5)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    drop_capabilities()
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != job["parent"]:
        raise OSError(f"parent {job['parent']} is gone")
    if job["readable"] is not None:
        allow_reading(job["readable"])
    filter_calls()


def prctl(option: int, *arguments: int) -> None:
    checked("prctl", libc.prctl(option, *map(ctypes.c_ulong, [*arguments, *[0] * (4 - len(arguments))])))


def checked(name: str, result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    return result


def drop_capabilities() -> None:
    """None are left to root either: some allowed calls can harm the machine with them, as madvise(MADV_HWPOISON)."""
    header, none = struct.pack("Ii", CAPABILITY_VERSION_3, 0), bytes(24)
    checked("capset", libc.capset(header, none))


def landlock_version() -> int:
    """Of the kernel's Landlock; 0 where there is none."""
    return max(0, libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), RULESET_VERSION))


def allow_reading(paths: list[str]) -> None:
    """Landlock: these files and folders can be read, nothing else can be opened. What is open stays so."""
    ruleset = checked("landlock_create_ruleset", libc.syscall(CREATE_RULESET, struct.pack("Q", ALL_ACCESS), 8, 0))
    for path in paths:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", READ_FILE | READ_DIR if os.path.isdir(path) else READ_FILE, fd)
        checked("landlock_add_rule", libc.syscall(ADD_RULE, ruleset, RULE_PATH_BENEATH, rule, 0))
        os.close(fd)
    checked("landlock_restrict_self", libc.syscall(RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)


def filter_calls() -> None:
    """seccomp: calls that are not allowed fail with ENOSYS; one of another ABI (int 0x80) ends the process."""
    instructions = seccomp_filter()
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in instructions))
    program = ctypes.create_string_buffer(struct.pack("HP", len(instructions), ctypes.addressof(code)))
    prctl(PR_SET_SECCOMP, MODE_FILTER, ctypes.addressof(program))


def seccomp_filter() -> list[tuple[int, int, int, int]]:
    """Instructions of classic BPF: (code, how many to skip if true, if false, operand). The low 32 bits of arguments
    are looked at, as the kernel takes no more of these."""
    program = [(LOAD, 0, 0, ARCH_OFFSET), (JUMP_EQUAL, 1, 0, ARCH_X86_64), (RETURN, 0, 0, KILL_PROCESS)]
    program += [(LOAD, 0, 0, NUMBER_OFFSET)]
    for number in ALLOWED.values():
        program += [(JUMP_EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    for number, argument in OPEN_FLAGS.items():
        other = ~READ_FLAGS & 0xFFFFFFFF
        check = [(JUMP_ANY_BIT, 1, 0, other), (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, REFUSE)]
        program += if_call(number, argument, check)
    for number, (argument, values) in VALUES.items():
        check = [step for value in values for step in ((JUMP_EQUAL, 0, 1, value), (RETURN, 0, 0, ALLOW))]
        program += if_call(number, argument, [*check, (RETURN, 0, 0, REFUSE)])
    return [*program, (RETURN, 0, 0, REFUSE)]


def if_call(number: int, argument: int, check: list[tuple[int, int, int, int]]) -> list[tuple[int, int, int, int]]:
    """A check of the low half of a call's argument; it has to end with a return."""
    load = (LOAD, 0, 0, ARGUMENTS_OFFSET + 8 * argument)
    return [(JUMP_EQUAL, 0, len(check) + 1, number), load, *check]


if __name__ == "__main__":
    main(int(sys.argv[1]))
