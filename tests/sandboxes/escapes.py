"""Attempts to get out of a sandbox or past its limits. Each prints ESCAPED where it succeeds.

They run as /usr/bin/python3 scripts, after PRELUDE, with what the host offers (see `Host`) as variables.
"""

PRELUDE = """
import ctypes, errno, os, resource, socket, stat, struct, sys, time, glob, platform
E = os.environ
LIBC = ctypes.CDLL(None, use_errno=True)
X86 = platform.machine() == "x86_64"
def escaped(really=True):
    if really:
        print("ESCAPED", flush=True)
def syscall(x86, arm, *arguments):
    LIBC.syscall.restype = ctypes.c_long
    done = LIBC.syscall(ctypes.c_long(x86 if X86 else arm), *arguments)
    if done < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return done
"""

ATTEMPTS: dict[str, str] = {
    # network and sockets
    "connect to the host's loopback": """
        escaped(socket.create_connection(("127.0.0.1", int(E["PORT"])), 2).recv(4) == b"host")""",
    "send a datagram to the host": """
        s = socket.socket(type=socket.SOCK_DGRAM); s.settimeout(2); s.connect(("127.0.0.1", int(E["UDP_PORT"])))
        s.send(b"x"); escaped(s.recv(4) == b"host")""",
    "see that a port of the host is taken": """
        try: socket.create_server(("127.0.0.1", int(E["PORT"])))
        except OSError as error: escaped(error.errno == errno.EADDRINUSE)""",
    "connect to a unix socket of the host": """
        s = socket.socket(socket.AF_UNIX); s.connect(E["UNIX_SOCKET"]); escaped()""",
    "connect to an abstract socket of the host": """
        s = socket.socket(socket.AF_UNIX); s.connect("\\0" + E["ABSTRACT_SOCKET"]); escaped()""",
    "open a packet socket": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW); escaped()",
    "open a raw socket": "socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP); escaped()",
    "open a socket to the hypervisor": "socket.socket(40, socket.SOCK_STREAM); escaped()",
    "listen on a privileged port": """
        open("/proc/sys/net/ipv4/ip_unprivileged_port_start").read(); s = socket.socket()
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); s.bind(("127.0.0.1", 1)); escaped()""",
    # files of the host
    "read a file of the host": "escaped('secret' in open(E['HOST_FILE']).read())",
    "read it through a process of the host": """
        escaped("secret" in open(f"/proc/{E['VICTIM']}/root" + E["HOST_FILE"]).read())""",
    "read it through the parent's folder": """
        escaped('secret' in open(f"/proc/{os.getppid()}/cwd/../../../../../../../../../.." + E["HOST_FILE"]).read())""",
    "read it by climbing out of the work folder": "escaped('secret' in open('../' * 30 + E['HOST_FILE']).read())",
    "hard-link it": "os.link(E['HOST_FILE'], E['HOST_LINK']); escaped(os.path.exists(E['HOST_LINK']))",
    "write next to it": "open(E['HOST_FILE'] + '.new', 'w').write('x'); escaped()",
    "list the home folder": "escaped(bool(os.listdir(E['HOST_HOME'])))",
    "read the passwords": "escaped(bool(open('/etc/shadow').read()))",
    "write to the system": """
        name = f"/usr/headway-escape-{os.getpid()}-{time.time_ns()}"
        open(name, "w").close(); os.unlink(name); escaped()""",
    "change a file's owner to root": "open('mine', 'w').close(); os.chown('mine', 0, 0); escaped()",
    "make a device of kernel memory": """
        os.mknod("kmsg", stat.S_IFCHR | 0o600, os.makedev(1, 11))
        os.open("kmsg", os.O_RDONLY | os.O_NONBLOCK); escaped()""",
    "open a file by its handle": """
        handle = ctypes.create_string_buffer(struct.pack("Ii", 128, 0) + bytes(128)); mount = ctypes.c_int()
        syscall(303, 264, -100, b"/usr/bin", handle, ctypes.byref(mount), 0)
        at = os.open("/usr", os.O_RDONLY); syscall(304, 265, at, handle, 0); escaped()""",
    # mounts and namespaces
    "mount a file system": """
        os.mkdir("m"); done = LIBC.mount(b"none", b"m", b"tmpfs", 0, None)
        if done == 0: LIBC.umount(b"m"); escaped()""",
    "mount with the new calls": "syscall(430, 430, b'tmpfs', 0); escaped()",
    "change the root": "os.chroot('/'); escaped()",
    "nest a user namespace": "assert LIBC.unshare(0x10000000) == 0; escaped()",
    "nest a user namespace by clone": """
        pid = syscall(56, 220, 0x10000000 | 17, None, None, None, None)
        if pid == 0: os._exit(0)
        os.waitpid(pid, 0); escaped()""",
    "nest a mount namespace": "assert LIBC.unshare(0x20000) == 0; escaped()",
    "nest a process namespace": "assert LIBC.unshare(0x20000000) == 0; escaped()",
    "join the network of a process of the host": """
        assert LIBC.setns(os.open(f"/proc/{E['VICTIM']}/ns/net", os.O_RDONLY), 0) == 0
        escaped(socket.create_connection(("127.0.0.1", int(E["PORT"])), 2).recv(4) == b"host")""",
    # other processes
    "see a process of the host": "escaped('headway-victim' in open(f\"/proc/{E['VICTIM']}/cmdline\").read())",
    "read its environment": "escaped('secret' in open(f\"/proc/{E['VICTIM']}/environ\").read())",
    "signal it": "os.kill(int(E['VICTIM']), 0); escaped()",
    "trace it": """
        LIBC.ptrace.restype = ctypes.c_long
        assert LIBC.ptrace(16, int(E["VICTIM"]), None, None) == 0
        os.waitpid(int(E["VICTIM"]), 0); LIBC.ptrace(17, int(E["VICTIM"]), None, None); escaped()""",
    "trace a process of its own": """
        pid = os.fork()
        if pid == 0: time.sleep(5); os._exit(0)
        done = LIBC.ptrace(0x4206, pid, None, None); os.kill(pid, 9); escaped(done == 0)""",
    "read the parent's memory": "escaped(os.open(f'/proc/{os.getppid()}/mem', os.O_RDONLY) > 0)",
    "read the parent's environment": "escaped(bool(open(f'/proc/{os.getppid()}/environ', 'rb').read()))",
    "read the parent's open files": """
        for name in os.listdir(f"/proc/{os.getppid()}/fd"):
            try: os.open(f"/proc/{os.getppid()}/fd/{name}", os.O_RDONLY | os.O_NONBLOCK); escaped()
            except OSError: pass""",
    "reach into another process by its handle": """
        pidfd = os.pidfd_open(int(E["VICTIM"])); syscall(438, 438, pidfd, 0, 0); escaped()""",
    "become root": "os.setuid(0); escaped(os.geteuid() == 0)",
    "have capabilities": """
        line = [l for l in open("/proc/self/status") if l.startswith("CapEff")][0]
        escaped(int(line.split()[1], 16) != 0)""",
    "gain privileges by a program": "escaped('NoNewPrivs:\\t0' in open('/proc/self/status').read())",
    "run without a filter of system calls": "escaped('Seccomp:\\t0' in open('/proc/self/status').read())",
    "share memory with the host": "escaped(LIBC.shmget(int(E['SHM_KEY']), 0, 0) >= 0)",
    "read shared memory files of the host": "escaped('secret' in open(E['SHM_FILE']).read())",
    # other episodes
    "read another episode's files": """
        found = glob.glob("/tmp/headway-sandboxes-*/**/" + E["OTHER_FILE"], recursive=True); escaped(bool(found))""",
    "see another episode's processes": """
        lines = [open(p, "rb").read() for p in glob.glob("/proc/[0-9]*/cmdline") if os.path.exists(p)]
        escaped(any(E["OTHER_SECONDS"].encode() in line and b"sleep" in line for line in lines))""",
    # the kernel
    "write a setting of the kernel": "open('/proc/sys/kernel/core_pattern', 'r+').close(); escaped()",
    "make a control group": """
        for place in ("/sys/fs/cgroup/memory", "/sys/fs/cgroup"):
            if os.path.isdir(place):
                name = f"{place}/escape-{os.getpid()}-{time.time_ns()}"; os.mkdir(name); os.rmdir(name)
                escaped(); break""",
    "leave its control group": """
        for place in ("/sys/fs/cgroup/pids", "/sys/fs/cgroup"):
            if os.path.isdir(place): open(f"{place}/cgroup.procs", "w").write("0"); escaped(); break""",
    "read the kernel's log": "escaped(LIBC.klogctl(10, None, 0) >= 0)",
    "set the clock": "time.clock_settime(time.CLOCK_REALTIME, time.time()); escaped()",
    "set the host's name": "socket.sethostname(socket.gethostname()); escaped()",
    "keep a key in the kernel": "syscall(248, 217, b'user', b'headway', b'x', 1, -3); escaped()",
    "watch the kernel's performance": """
        syscall(298, 241, struct.pack("IIQQQQQ", 1, 112, 0, 0, 0, 0, 0) + bytes(72), 0, -1, -1, 0); escaped()""",
    "handle page faults": "syscall(323, 282, 1); escaped()",
    "queue io in the kernel": "syscall(425, 425, 4, ctypes.create_string_buffer(120)); escaped()",
    "raise its priority": "os.nice(-5); escaped()",
    "run in real time": "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)); escaped()",
    # limits
    "take memory beyond the limit": """
        x = [bytearray(os.urandom(1 << 20)) for _ in range(160)]; escaped(len(x) == 160)""",
    "start processes beyond the limit": """
        for n in range(80):
            if os.fork() == 0: time.sleep(3); os._exit(0)
        escaped()""",
    "write beyond the disk's limit": "open('big', 'wb').write(bytes(40 << 20)); escaped()",
    "write beyond it in the temporary folder": """
        name = f"/tmp/headway-escape-{time.time_ns()}"
        with open(name, "wb") as f: f.write(bytes(40 << 20))
        os.unlink(name); escaped()""",
    "write beyond it in shared memory": """
        name = f"/dev/shm/headway-escape-{time.time_ns()}"
        with open(name, "wb") as f: f.write(bytes(40 << 20))
        os.unlink(name); escaped()""",
    "make files beyond the limit": """
        for n in range(5000): open(f"file{n}", "w").close()
        escaped()""",
}
