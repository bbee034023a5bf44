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
#include <dlfcn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

using Main = int (*)(int, char**, char**);
using Files = std::array<int, 4>;

Main real_main;

// The arguments of main(), with the working directory in the place of the program's name.
std::vector<char*> split(char* text, size_t size) {
  std::vector<char*> parts;
  for (char* at = text; at < text + size; at += std::strlen(at) + 1) parts.push_back(at);
  return parts;
}

int run(char* program, std::vector<char*> arguments, const Files& files, char** environment) {
  if (chdir(arguments.front()) != 0) _exit(127);
  for (int i = 0; i < 3; ++i) dup2(files[1 + i], i);  // The copies stay open in the program.
  arguments.front() = program;
  arguments.push_back(nullptr);
  return real_main(static_cast<int>(arguments.size()) - 1, arguments.data(), environment);
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
  for (;;) {
    alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(Files))> control;
    iovec part{text.data(), text.size() - 1};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    const ssize_t size = recvmsg(requests, &message, MSG_CMSG_CLOEXEC);
    const cmsghdr* header = CMSG_FIRSTHDR(&message);
    if (size <= 0 || header == nullptr) return 0;
    text[size] = 0;
    Files files;
    std::memcpy(files.data(), CMSG_DATA(header), sizeof files);
    if (fork() == 0) {
      close(requests);
      answer(argv[0], text.data(), size, files, environment);
    }
    for (const int file : files) close(file);
  }
}

}  // namespace

// glibc's. The program calls it with its main().
extern "C" int __libc_start_main(Main main, int argc, char** argv, void (*init)(), void (*fini)(),
                                 void (*at_exit)(), void* stack) {
  const auto start =
      reinterpret_cast<decltype(&__libc_start_main)>(dlsym(RTLD_NEXT, "__libc_start_main"));
  real_main = main;
  const bool serves = std::getenv("FORK_SERVER_SOCKET") != nullptr;
  return start(serves ? serve : main, argc, argv, init, fini, at_exit, stack);
}
