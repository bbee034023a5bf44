// Starts one program many times for the price of one start. The Python tests start the command line
// about a thousand times, and each start spends a quarter of a second on loading LibTorch.
//
// This library is preloaded into the program (LD_PRELOAD). Its serve() takes the place of main():
// it waits for requests on the socket whose descriptor FORK_SERVER_SOCKET names, and answers each
// with a fork in which the program's own main() runs. Shared libraries are loaded and static
// initialisers have run by then. There are no threads yet, so a fork equals a fresh start.
// tests/python/fork_server.py is the other end.
//
// A request is one packet: the working directory and then each argument, all ended by a zero byte.
// Four descriptors come with it: a socket for the answer, and the standard input, output and error.
// The answer is the number of the process (int32) at once, and its wait status (int32) at its end.
// The server ends when the other end of its socket is closed.
//
// A program that starts others of its kind (`train --processes`, `compare --jobs`) has a spare
// process: a fork from before its main(). posix_spawn() of the program itself asks the spare for a
// fork, which becomes a child of the program (CLONE_PARENT), and has nothing of what the program
// has done so far.
#include <dlfcn.h>
#include <fcntl.h>
#include <sched.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

namespace {

using Main = int (*)(int, char**, char**);
using Files = std::array<int, 4>;

Main real_main;
int spare = -1;         // the program's end of a socket to its spare process
int spawn_output = -1;  // where the program that is started next writes

template <class F>
F following(F, const char* name) {
  return reinterpret_cast<F>(dlsym(RTLD_NEXT, name));
}

std::vector<char*> split(char* text, size_t size) {
  std::vector<char*> parts;
  for (char* at = text; at < text + size; at += std::strlen(at) + 1) parts.push_back(at);
  return parts;
}

// A packet of at most size - 1 bytes with a zero byte after it, and its descriptors, of which those
// that do not come are -1. Returns the packet's size, or 0 where the other end is closed.
template <size_t N>
size_t receive(int socket, char* text, size_t size, std::array<int, N>& files) {
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof files)> control;
  iovec part{text, size - 1};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  const ssize_t received = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  if (received <= 0) return 0;
  text[received] = 0;
  files.fill(-1);
  if (const cmsghdr* header = CMSG_FIRSTHDR(&message)) {
    std::memcpy(files.data(), CMSG_DATA(header), header->cmsg_len - CMSG_LEN(0));
  }
  return static_cast<size_t>(received);
}

int begin(std::vector<char*> arguments, char** environment);

// What a spare process does until its program ends. A request has the number of arguments, the
// arguments and the environment. The answer is the number of the new process.
[[noreturn]] void stand_by(int requests) {
  static std::array<char, 1 << 18> text;
  std::array<int, 1> output{};
  while (const size_t size = receive(requests, text.data(), text.size(), output)) {
    const auto child = static_cast<int32_t>(syscall(SYS_clone, CLONE_PARENT | SIGCHLD, 0, 0, 0, 0));
    if (child == 0) {
      close(requests);
      setpgid(0, 0);
      dup2(open("/dev/null", O_RDONLY | O_CLOEXEC), 0);
      if (output[0] >= 0) {
        dup2(output[0], 1);
        dup2(output[0], 2);
        close(output[0]);
      }
      const std::vector<char*> parts = split(text.data(), size);
      const auto end = parts.begin() + 1 + std::atoi(parts[0]);
      std::vector<char*> variables(end, parts.end());
      variables.push_back(nullptr);
      environ = variables.data();
      std::exit(begin({parts.begin() + 1, end}, environ));
    }
    if (output[0] >= 0) close(output[0]);
    if (write(requests, &child, sizeof child) != sizeof child) break;
  }
  _exit(0);
}

int begin(std::vector<char*> arguments, char** environment) {
  bool starts_others = false;
  for (const std::string_view argument : arguments) {
    starts_others = starts_others || argument == "--processes" || argument == "--jobs";
  }
  std::array<int, 2> ends{};
  if (starts_others && socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends.data()) == 0) {
    if (fork() == 0) {
      close(ends[0]);
      stand_by(ends[1]);
    }
    close(ends[1]);
    spare = ends[0];
  }
  arguments.push_back(nullptr);
  return real_main(static_cast<int>(arguments.size()) - 1, arguments.data(), environment);
}

// Its first argument is the working directory, in the place of the program's name.
int run(char* program, std::vector<char*> arguments, const Files& files, char** environment) {
  if (chdir(arguments.front()) != 0) _exit(127);
  for (int i = 0; i < 3; ++i) dup2(files[1 + i], i);  // The copies stay open in the program.
  arguments.front() = program;
  return begin(std::move(arguments), environment);
}

// Runs in a process of its own for each request and waits for the program.
[[noreturn]] void answer(char* program, char* text, size_t size, const Files& files,
                         char** environment) {
  std::signal(SIGCHLD, SIG_DFL);
  const int32_t child = fork();
  if (child == 0) std::exit(run(program, split(text, size), files, environment));
  for (int i = 1; i < 4; ++i) close(files[i]);
  bool told = write(files[0], &child, sizeof child) == sizeof child;
  int status = 0;
  while (waitpid(child, &status, 0) < 0) {
  }
  const int32_t result = status;
  told = told && write(files[0], &result, sizeof result) == sizeof result;
  _exit(told ? 0 : 1);
}

int serve(int, char** argv, char** environment) {
  const int requests = std::atoi(std::getenv("FORK_SERVER_SOCKET"));
  unsetenv("FORK_SERVER_SOCKET");
  unsetenv("LD_PRELOAD");         // What the program starts itself starts as usual.
  std::signal(SIGCHLD, SIG_IGN);  // Nobody waits for the processes that answer.
  static std::array<char, 1 << 16> text;
  Files files{};
  while (const size_t size = receive(requests, text.data(), text.size(), files)) {
    if (fork() == 0) {
      close(requests);
      answer(argv[0], text.data(), size, files, environment);
    }
    for (const int file : files) close(file);
  }
  return 0;
}

}  // namespace

// glibc's. The program calls it with its main().
extern "C" int __libc_start_main(Main main, int argc, char** argv, void (*init)(), void (*fini)(),
                                 void (*at_exit)(), void* stack) {
  const auto start = following(&__libc_start_main, "__libc_start_main");
  real_main = main;
  const bool serves = std::getenv("FORK_SERVER_SOCKET") != nullptr;
  return start(serves ? serve : main, argc, argv, init, fini, at_exit, stack);
}

// Of the actions src/core/spawn.cpp asks for, a spare process must be told this one.
extern "C" int posix_spawn_file_actions_adddup2(posix_spawn_file_actions_t* actions, int from,
                                                int to) noexcept {
  spawn_output = from;
  return following(&posix_spawn_file_actions_adddup2, "posix_spawn_file_actions_adddup2")(actions,
                                                                                          from, to);
}

extern "C" int posix_spawn(pid_t* id, const char* path, const posix_spawn_file_actions_t* actions,
                           const posix_spawnattr_t* attributes, char* const* arguments,
                           char* const* variables) noexcept {
  int output = spawn_output;
  spawn_output = -1;
  if (spare < 0) {
    return following(&posix_spawn, "posix_spawn")(id, path, actions, attributes, arguments,
                                                  variables);
  }
  size_t count = 0;
  std::string text;
  for (; arguments[count] != nullptr; ++count) text.append(arguments[count]).push_back('\0');
  for (; *variables != nullptr; ++variables) text.append(*variables).push_back('\0');
  text = std::to_string(count) + '\0' + text;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof output)> control{};
  iovec part{text.data(), text.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (output >= 0) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof output);
    std::memcpy(CMSG_DATA(header), &output, sizeof output);
  }
  int32_t child = -1;
  if (sendmsg(spare, &message, MSG_NOSIGNAL) < 0) return errno;
  if (read(spare, &child, sizeof child) != sizeof child || child < 0) return EAGAIN;
  *id = child;
  return 0;
}
