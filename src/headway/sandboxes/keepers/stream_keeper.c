// The first process of a sandbox that shares no kernel or no socket with its worker: everything crosses its wall as
// frames, on this process's stdin and stdout.
//
// Usage: stream_keeper [UID [PROCESSES]]. Commands run as UID (0: as whoever this is). A frame is four integers
// (operation, number, value, length) and `length` bytes. From the worker:
//   F  filter: the seccomp filter that every later command gets
//   R  run as command `number`: "cwd\0count\0argument\0...variable\0..."
//   C  connect to loopback port `value` as channel `number`; L  listen there
//   I  bytes for the stdin of a command, or for a connection; none: no more will come
//   G  grant: the worker has consumed `value` bytes of `number`, and as many more may be sent
//   K  kill the group of command `number` with signal `value`; D  drop `number`: nobody reads it any more
// To the worker:
//   S  started (once); X  command `number` ended with wait status `value & 65535`, and 65536 where the disk is full
//   O  bytes of stdout, or of a connection; E  of stderr; none: no more will come
//   G  grant, as above, for I; C, L  an errno or 0; A  listener `number` accepted a connection, which is channel `value`
// A sender has at most WINDOW bytes of a number under way, so that nobody has to hold more.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MOST = 1024, WINDOW = 1 << 18, CHUNK = 1 << 16, LARGEST = 16 << 20, ACCEPTED = 1 << 30 };
typedef struct {
    int used, listens;
    int32_t number;
    pid_t pid;
    int in, out, err;             // where bytes go, and where they come from; -1 once closed
    int ending;                   // close `in` when all that waits is written
    uint32_t credit;              // bytes that may still be sent
    size_t waits;                 // bytes in `buffer`
    char *buffer;
} Channel;
static Channel channels[MOST];
static int wake[2], uid, accepted = ACCEPTED;
static struct sock_fprog filter;

static void send_frame(int32_t operation, int32_t number, int32_t value, const char *data, size_t length) {
    int32_t header[4] = {operation, number, value, (int32_t)length};
    const char *parts[2] = {(char *)header, data};
    size_t lengths[2] = {sizeof header, length};
    for (int i = 0; i < 2; i++)
        for (size_t at = 0; at < lengths[i];) {
            ssize_t sent = write(1, parts[i] + at, lengths[i] - at);
            if (sent < 0 && errno == EAGAIN) poll(&(struct pollfd){1, POLLOUT, 0}, 1, -1);
            else if (sent < 0 && errno != EINTR) _exit(1);
            else if (sent > 0) at += sent;
        }
}

static void shut(int *descriptor) {
    if (*descriptor >= 0) close(*descriptor);
    *descriptor = -1;
}

static void forget(Channel *channel) {
    if (channel->in != channel->out) shut(&channel->in);
    channel->in = -1;
    shut(&channel->out), shut(&channel->err);
    free(channel->buffer);
    *channel = (Channel){.in = -1, .out = -1, .err = -1};
}

static Channel *find(int32_t number) {
    for (int i = 0; i < MOST; i++)
        if (channels[i].used && channels[i].number == number) return &channels[i];
    return NULL;
}

static Channel *open_channel(int32_t number) {
    for (int i = 0; i < MOST; i++)
        if (!channels[i].used) {
            channels[i] = (Channel){.used = 1, .number = number, .in = -1, .out = -1, .err = -1, .credit = WINDOW};
            return &channels[i];
        }
    return NULL;
}

static void fail(const char *what, const char *name, int code) {
    dprintf(2, "%s %s: %s\n", what, name, strerror(errno));
    _exit(code);
}

static void become(char *text, size_t length, const int *ends) {
    setsid();
    for (int i = 0; i < 3; i++) dup2(ends[i], i);
    for (int i = 3; i < 4096; i++) close(i);
    signal(SIGPIPE, SIG_DFL), signal(SIGCHLD, SIG_DFL);
    char *at = text, *end = text + length, *cwd = at;
    at += strlen(at) + 1;
    size_t count = strtoul(at, NULL, 10), words = 0;
    at += strlen(at) + 1;
    for (char *look = at; look < end; look += strlen(look) + 1) words++;
    char **argv = calloc(words + 2, sizeof *argv), **envp = argv + count + 1;
    for (size_t i = 0; i < words; i++, at += strlen(at) + 1) argv[i + (i >= count)] = at;
    if (uid && (setgroups(0, NULL) || setresgid(uid, uid, uid) || setresuid(uid, uid, uid))) fail("cannot become", "the user", 126);
    if (chdir(cwd) < 0) fail("cannot enter", cwd, 126);
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    if (filter.len && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter)) fail("cannot install", "the filter", 126);
    environ = envp;
    execvp(argv[0], argv);
    fail("cannot run", argv[0], errno == ENOENT ? 127 : 126);
}

static void run(int32_t number, char *text, size_t length) {
    int pipes[3][2];
    Channel *channel = open_channel(number);
    if (!channel) return send_frame('X', number, 126 << 8, NULL, 0);
    for (int i = 0; i < 3; i++) pipe2(pipes[i], O_CLOEXEC);
    channel->pid = fork();
    if (channel->pid == 0) become(text, length, (int[]){pipes[0][0], pipes[1][1], pipes[2][1]});
    if (channel->pid < 0) {
        dprintf(pipes[2][1], "cannot start a process: %s\n", strerror(errno));
        send_frame('X', number, 126 << 8, NULL, 0);
        channel->pid = 0;
    }
    close(pipes[0][0]), close(pipes[1][1]), close(pipes[2][1]);
    channel->in = pipes[0][1], channel->out = pipes[1][0], channel->err = pipes[2][0];
    fcntl(channel->in, F_SETFL, O_NONBLOCK);
}

static void open_port(int32_t operation, int32_t number, int port) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int one = 1, handle = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), failed;
    setsockopt(handle, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (operation == 'L')
        failed = bind(handle, (void *)&address, sizeof address) < 0 || listen(handle, 128) < 0;
    else
        failed = connect(handle, (void *)&address, sizeof address) < 0;
    Channel *channel = failed ? NULL : open_channel(number);
    send_frame(operation, number, channel ? 0 : failed ? errno : EMFILE, NULL, 0);
    if (!channel) {
        close(handle);
        return;
    }
    fcntl(handle, F_SETFL, O_NONBLOCK);
    channel->out = handle, channel->listens = operation == 'L';
    if (operation == 'C') channel->in = handle;
}

static void take(Channel *listener) {
    int handle = accept4(listener->out, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (handle < 0) return;
    Channel *channel = open_channel(accepted);
    if (!channel) {
        close(handle);
        return;
    }
    channel->in = channel->out = handle;
    send_frame('A', listener->number, accepted++, NULL, 0);
}

static void stop_writing(Channel *channel) {
    if (channel->in >= 0 && channel->in == channel->out) shutdown(channel->in, SHUT_WR), channel->in = -1;
    else shut(&channel->in);
}

static void drain(Channel *channel) {
    size_t done = 0;
    while (done < channel->waits && channel->in >= 0) {
        ssize_t written = write(channel->in, channel->buffer + done, channel->waits - done);
        if (written < 0 && errno == EAGAIN) break;
        if (written < 0) {  // nobody reads: what comes is thrown away
            stop_writing(channel);
            break;
        }
        done += written;
    }
    if (channel->in < 0) done = channel->waits;
    memmove(channel->buffer, channel->buffer + done, channel->waits - done);
    channel->waits -= done;
    if (done) send_frame('G', channel->number, (int32_t)done, NULL, 0);
    if (!channel->waits && channel->ending) stop_writing(channel);
}

static void input(Channel *channel, const char *data, size_t length) {
    if (!channel->buffer) channel->buffer = malloc(WINDOW);
    if (channel->waits + length > WINDOW) _exit(1);  // the worker broke its word
    memcpy(channel->buffer + channel->waits, data, length);
    channel->waits += length;
    if (!length) channel->ending = 1;
    drain(channel);
}

static void handle(int32_t *header, char *data) {
    int32_t operation = header[0], number = header[1], value = header[2];
    size_t length = header[3];
    Channel *channel = find(number);
    if (operation == 'F') {
        filter.filter = malloc(length);
        memcpy(filter.filter, data, length);
        filter.len = length / sizeof *filter.filter;
    } else if (operation == 'R') run(number, data, length);
    else if (operation == 'C' || operation == 'L') open_port(operation, number, value);
    else if (!channel) return;
    else if (operation == 'I') input(channel, data, length);
    else if (operation == 'G') channel->credit += value;
    else if (operation == 'K' && channel->pid > 0) kill(-channel->pid, value);
    else if (operation == 'D') {
        stop_writing(channel);
        if (channel->pid > 0) shut(&channel->out), shut(&channel->err);
        else forget(channel);
    }
}

static void serve(void) {
    static char *received;
    static size_t have, room;
    if (room - have < CHUNK) received = realloc(received, room += 2 * CHUNK);
    ssize_t got = read(0, received + have, CHUNK);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got <= 0) _exit(0);
    have += got;
    size_t at = 0;
    while (have - at >= 16) {
        int32_t header[4];
        memcpy(header, received + at, 16);
        if (header[3] < 0 || header[3] > LARGEST) _exit(1);
        if (have - at - 16 < (size_t)header[3]) break;
        handle(header, received + at + 16);
        at += 16 + header[3];
    }
    memmove(received, received + at, have - at);
    have -= at;
}

static void output(Channel *channel, int32_t operation, int *from) {
    static char data[CHUNK];
    ssize_t got = read(*from, data, channel->credit < CHUNK ? channel->credit : CHUNK);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got <= 0) {
        if (*from == channel->in) *from = -1;  // the other direction of a connection stays open
        else shut(from);
        got = 0;
    }
    channel->credit -= got;
    send_frame(operation, channel->number, 0, data, got);
}

static void reap(void) {
    struct statvfs disk;
    int status;
    for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;)
        for (int i = 0; i < MOST; i++)
            if (channels[i].used && channels[i].pid == pid) {
                int full = !statvfs("/workspace", &disk) && disk.f_bavail == 0;
                channels[i].pid = 0;
                send_frame('X', channels[i].number, (status & 0xffff) | full << 16, NULL, 0);
            }
}

static void woken(int signal) {
    (void)signal;
    int before = errno;
    if (write(wake[1], "", 1) < 0) {}
    errno = before;
}

int main(int argc, char **argv) {
    if (*environ) execve(argv[0], argv, (char *[]){NULL});  // kernels that show any process's variables shall find none
    uid = argc > 1 ? atoi(argv[1]) : 0;
    if (uid) {  // container tools make these as root's
        const char *folders[] = {"/workspace", "/home/agent", "/tmp"};
        for (int i = 0; i < 3; i++)
            if (chown(folders[i], uid, uid)) {}
    }
    prctl(PR_SET_DUMPABLE, 0);
    if (argc > 2) {
        struct rlimit most = {strtoul(argv[2], NULL, 10), strtoul(argv[2], NULL, 10)};
        setrlimit(RLIMIT_NPROC, &most);
    }
    pipe2(wake, O_CLOEXEC | O_NONBLOCK);
    signal(SIGCHLD, woken), signal(SIGPIPE, SIG_IGN);
    send_frame('S', 0, getpid(), NULL, 0);
    static struct pollfd waiting[2 + 3 * MOST];
    static struct { Channel *channel; int32_t operation; } asked[2 + 3 * MOST];
    for (char drained[256];;) {
        int count = 2;
        waiting[0] = (struct pollfd){0, POLLIN, 0}, waiting[1] = (struct pollfd){wake[0], POLLIN, 0};
        for (int i = 0; i < MOST; i++) {
            Channel *channel = &channels[i];
            if (!channel->used) continue;
            if (!channel->pid && channel->in < 0 && channel->out < 0 && channel->err < 0) {
                forget(channel);
                continue;
            }
            int wanted[3] = {channel->waits ? channel->in : -1, channel->credit ? channel->out : -1, channel->credit ? channel->err : -1};
            for (int k = 0; k < 3; k++)
                if (wanted[k] >= 0) {
                    waiting[count] = (struct pollfd){wanted[k], k ? POLLIN : POLLOUT, 0};
                    asked[count].channel = channel, asked[count++].operation = "IOE"[k];
                }
        }
        if (poll(waiting, count, -1) < 0 && errno != EINTR) _exit(1);
        for (int i = 2; i < count; i++) {
            Channel *channel = asked[i].channel;
            if (!waiting[i].revents) continue;
            if (asked[i].operation == 'I') drain(channel);
            else if (channel->listens) take(channel);
            else if (channel->credit) output(channel, asked[i].operation, asked[i].operation == 'O' ? &channel->out : &channel->err);
        }
        if (waiting[1].revents) {
            while (read(wake[0], drained, sizeof drained) > 0) {}
            reap();
        }
        if (waiting[0].revents) serve();
    }
}
