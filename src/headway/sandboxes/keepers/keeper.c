// The first process of a sandbox: starts commands for the worker outside, reports their ends, and ends with it.
//
// Usage: keeper SOCKET [PROCESSES]. PROCESSES bounds those of the sandbox's user namespace, where no control group does:
// set here and not before, it counts none outside. The socket is a SOCK_SEQPACKET whose other end the worker holds. Requests are three integers
// (operation, number, value) with file descriptors; replies are four (operation, number, value, disk full).
//   R  run: descriptors are a file with "cwd\0count\0argument\0...variable\0...", stdin, stdout, stderr
//   K  kill the group of command `number` with signal `value`
//   L  listen on loopback port `value`; the reply carries the socket
//   C  connect to loopback port `value`; the reply carries the socket
// Replies: S started (once), E command `number` ended with wait status `value`, L and C with an errno or 0.
// Being process 1 of its namespace, it can't be killed from inside; being undumpable, it can't be read.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MOST = 4096 };
static struct { pid_t pid; uint32_t number; } commands[MOST];
static int control;
static sigset_t normal;

static void reply(uint32_t operation, uint32_t number, int32_t value, int descriptor) {
    struct statvfs disk;
    uint32_t full = operation == 'E' && !statvfs("/workspace", &disk) && disk.f_bavail == 0;
    int32_t words[4] = {(int32_t)operation, (int32_t)number, value, (int32_t)full};
    struct iovec vector = {words, sizeof words};
    union { struct cmsghdr header; char room[CMSG_SPACE(sizeof(int))]; } extra = {0};
    struct msghdr message = {.msg_iov = &vector, .msg_iovlen = 1};
    if (descriptor >= 0) {
        message.msg_control = extra.room;
        message.msg_controllen = sizeof extra.room;
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(header), &descriptor, sizeof(int));
    }
    if (sendmsg(control, &message, MSG_NOSIGNAL) < 0) _exit(1);
}

static void fail(const char *what, const char *name, int code) {
    dprintf(2, "%s %s: %s\n", what, name, strerror(errno));
    _exit(code);
}

static void become(int payload, int in, int out, int err) {
    struct stat status;
    if (fstat(payload, &status) < 0) _exit(126);
    char *text = malloc(status.st_size + 1);
    for (off_t at = 0; at < status.st_size;) {
        ssize_t got = pread(payload, text + at, status.st_size - at, at);
        if (got <= 0) _exit(126);
        at += got;
    }
    setsid();
    dup2(in, 0), dup2(out, 1), dup2(err, 2);
    close_range(3, ~0U, 0);
    sigprocmask(SIG_SETMASK, &normal, NULL);
    char *at = text, *end = text + status.st_size, *cwd = at;
    at += strlen(at) + 1;
    size_t count = strtoul(at, NULL, 10), words = 0;
    at += strlen(at) + 1;
    for (char *look = at; look < end; look += strlen(look) + 1) words++;
    char **argv = calloc(words + 2, sizeof *argv), **envp = argv + count + 1;
    for (size_t i = 0; i < words; i++, at += strlen(at) + 1) argv[i + (i >= count)] = at;
    if (chdir(cwd) < 0) fail("cannot enter", cwd, 126);
    environ = envp;
    execvp(argv[0], argv);
    fail("cannot run", argv[0], errno == ENOENT ? 127 : 126);
}

static void start(uint32_t number, const int *given) {
    int slot = 0;
    while (slot < MOST && commands[slot].pid) slot++;
    pid_t pid = slot < MOST ? fork() : (errno = EAGAIN, -1);
    if (pid == 0) become(given[0], given[1], given[2], given[3]);
    if (pid < 0) {
        dprintf(given[3], "cannot start a process: %s\n", strerror(errno));
        reply('E', number, 126 << 8, -1);
    } else {
        commands[slot].pid = pid;
        commands[slot].number = number;
    }
}

static void open_port(uint32_t operation, uint32_t number, int port) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int one = 1, handle = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), failed;
    setsockopt(handle, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (operation == 'L')
        failed = bind(handle, (void *)&address, sizeof address) < 0 || listen(handle, 128) < 0;
    else
        failed = connect(handle, (void *)&address, sizeof address) < 0 && errno != EINPROGRESS;
    reply(operation, number, failed ? errno : 0, failed ? -1 : handle);
    close(handle);
}

static void serve(void) {
    int32_t words[3];
    struct iovec vector = {words, sizeof words};
    union { struct cmsghdr header; char room[CMSG_SPACE(4 * sizeof(int))]; } extra;
    struct msghdr message = {.msg_iov = &vector, .msg_iovlen = 1, .msg_control = extra.room, .msg_controllen = sizeof extra.room};
    ssize_t got = recvmsg(control, &message, MSG_CMSG_CLOEXEC);
    if (got <= 0) _exit(0);
    int given[4], count = 0;
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    if (header && header->cmsg_type == SCM_RIGHTS) {
        count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        memcpy(given, CMSG_DATA(header), count * sizeof(int));
    }
    if (words[0] == 'R' && count == 4) start(words[1], given);
    if (words[0] == 'K')
        for (int i = 0; i < MOST; i++)
            if (commands[i].pid && commands[i].number == (uint32_t)words[1]) kill(-commands[i].pid, words[2]);
    if (words[0] == 'L' || words[0] == 'C') open_port(words[0], words[1], words[2]);
    for (int i = 0; i < count; i++) close(given[i]);
}

static void reap(void) {
    int status;
    for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;)
        for (int i = 0; i < MOST; i++)
            if (commands[i].pid == pid) {
                commands[i].pid = 0;
                reply('E', commands[i].number, status, -1);
                break;
            }
}

int main(int argc, char **argv) {
    control = argc > 1 ? atoi(argv[1]) : 3;
    fcntl(control, F_SETFD, FD_CLOEXEC);
    prctl(PR_SET_DUMPABLE, 0);
    if (argc > 2) {
        struct rlimit most = {strtoul(argv[2], NULL, 10), strtoul(argv[2], NULL, 10)};
        setrlimit(RLIMIT_NPROC, &most);
    }
    sigset_t child;
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    sigprocmask(SIG_BLOCK, &child, &normal);
    int signals = signalfd(-1, &child, SFD_CLOEXEC | SFD_NONBLOCK);
    reply('S', 0, getpid(), -1);
    for (struct signalfd_siginfo drained;;) {
        struct pollfd waiting[2] = {{control, POLLIN, 0}, {signals, POLLIN, 0}};
        if (poll(waiting, 2, -1) < 0 && errno != EINTR) _exit(1);
        if (waiting[1].revents) {
            while (read(signals, &drained, sizeof drained) > 0) {}
            reap();
        }
        if (waiting[0].revents) serve();
    }
}
