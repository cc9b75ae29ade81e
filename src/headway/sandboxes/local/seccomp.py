"""A seccomp filter as classic BPF: system calls that no program in a sandbox needs answer "not permitted".

Namespaces and missing capabilities already refuse most of them; the filter keeps the kernel code behind them out of
reach, and closes what namespaces do not cover: keyrings, AF_VSOCK (which reaches the hypervisor), terminal injection.
"""

import errno
import platform
import struct
from collections.abc import Sequence

_LOAD, _EQUAL, _GREATER, _ANY_BIT, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCH, _FIRST_ARGUMENT, _SECOND_ARGUMENT = 0, 4, 16, 24

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x40000000

# fmt: off
_NUMBERS: dict[str, tuple[int, int]] = {  # name: x86_64, aarch64 (-1 where there is none)
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "unshare": (272, 97), "setns": (308, 268), "open_tree": (428, 428), "move_mount": (429, 429),
    "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "acct": (163, 89), "swapon": (167, 224), "swapoff": (168, 225), "reboot": (169, 142), "quotactl": (179, 60),
    "clock_settime": (227, 112), "clock_adjtime": (305, 266), "settimeofday": (164, 170), "adjtimex": (159, 171),
    "syslog": (103, 116), "vhangup": (153, 58), "fanotify_init": (300, 262), "lookup_dcookie": (212, 18),
    "iopl": (172, -1), "ioperm": (173, -1), "modify_ldt": (154, -1), "sethostname": (170, 161),
    "setdomainname": (171, 162),
}
# fmt: on
_SOCKET, _IOCTL, _CLONE = (41, 198), (16, 29), (56, 220)
_FAMILIES = (1, 2, 10, 16)
"""AF_UNIX, AF_INET, AF_INET6 and AF_NETLINK (which resolvers ask for addresses); all within the sandbox's network."""
_INJECTING = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX: they type into a terminal."""
_NEW_NAMESPACES = 0x7E020000
"""The flags of clone that ask for a namespace of any kind."""


_MORE = {"setpriority": (140, 140)}


def sandbox_filter(machine: str | None = None, also: Sequence[str] = ()) -> bytes:
    """Compile the filter for this machine, with some calls more that a kernel needs to be kept from.

    Raises ValueError for a machine whose call numbers are not known here.
    """
    machine = machine or platform.machine()
    if machine not in _AUDIT_ARCH:
        raise ValueError(f"no seccomp filter for {machine}")
    column = list(_AUDIT_ARCH).index(machine)
    refuse = _RETURN, 0, 0, _ERRNO | errno.EPERM
    program = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, _AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":  # the x32 calls are the same ones under other numbers
        program += [(_GREATER, 0, 1, _X32_BIT - 1), refuse]
    for numbers in [*_NUMBERS.values(), *(_MORE[name] for name in also)]:
        if numbers[column] >= 0:
            program += [(_EQUAL, 0, 1, numbers[column]), refuse]
    # socket: only the families above; the argument is loaded where the number matches, and jumped over elsewhere
    program += [(_EQUAL, 0, len(_FAMILIES) + 3, _SOCKET[column]), (_LOAD, 0, 0, _FIRST_ARGUMENT)]
    program += [(_EQUAL, len(_FAMILIES) - i, 0, family) for i, family in enumerate(_FAMILIES)]
    program += [refuse, (_RETURN, 0, 0, _ALLOW)]
    program += [(_EQUAL, 0, 5, _IOCTL[column]), (_LOAD, 0, 0, _SECOND_ARGUMENT)]
    program += [(_EQUAL, 2, 0, _INJECTING[0]), (_EQUAL, 1, 0, _INJECTING[1]), (_RETURN, 0, 0, _ALLOW), refuse]
    program += [(_EQUAL, 0, 4, _CLONE[column]), (_LOAD, 0, 0, _FIRST_ARGUMENT)]
    program += [(_ANY_BIT, 1, 0, _NEW_NAMESPACES), (_RETURN, 0, 0, _ALLOW), refuse]
    # clone3 hides its flags from filters: the C library falls back to clone where it does not exist
    program += [(_EQUAL, 0, 1, 435), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS), (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("HBBI", *step) for step in program)
