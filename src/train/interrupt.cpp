#include "train/interrupt.h"

#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdint>
#include <ctime>
#include <string_view>

namespace headloom {

static volatile std::sig_atomic_t g_interrupted = 0;

static volatile std::sig_atomic_t g_requeue = 0;

static std::string_view g_answer;

// Where this process writes into a pipe, the signal may have ended its reader too. What is still
// said then must not end this process before it has saved.
static void interrupt() {
  std::signal(SIGPIPE, SIG_IGN);
  g_interrupted = 1;
}

static void on_announcement(int) {
  g_requeue = 1;
  interrupt();
}

// When the last Ctrl-C or SIGTERM that counted came, in milliseconds; 0: none has.
static std::atomic<int64_t> g_last = 0;

static int64_t milliseconds_now() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);  // which a signal's handler may call
  return int64_t{1000} * now.tv_sec + now.tv_nsec / 1'000'000;
}

// Two threads may handle two signals at the same time. Both then read the same g_last, and only the
// one that changes it counts.
static void on_interrupt(int signal) {
  // `timeout` and others send one request to the process and to its group. The two may be handled
  // some time apart where the machine is busy.
  constexpr int64_t kOneRequest = 500;
  int64_t last = g_last;
  const int64_t now = milliseconds_now();
  if (last > 0 && now < last + kOneRequest) return;
  if (!g_last.compare_exchange_strong(last, now)) return;
  interrupt();
  if (last == 0) {
    if (::write(STDERR_FILENO, g_answer.data(), g_answer.size()) < 0) return;
  } else {
    std::signal(signal, SIG_DFL);
    std::raise(signal);
  }
}

// A terminal that closes sends it twice: through its shell, and when the shell has ended.
static void on_hang_up(int) { interrupt(); }

void install_interrupt_handler(std::string_view answer) {
  // Of the processes that get a terminal's signal together, the one that the user started answers.
  if (::isatty(STDERR_FILENO) == 1 && ::getpgrp() == ::getpid()) g_answer = answer;
  std::signal(SIGINT, on_interrupt);
  std::signal(SIGTERM, on_interrupt);
  std::signal(SIGUSR1, on_announcement);
  // Under nohup the terminal may close.
  if (std::signal(SIGHUP, on_hang_up) == SIG_IGN) std::signal(SIGHUP, SIG_IGN);
}

bool to_be_requeued() { return g_requeue != 0; }

bool interrupted() { return g_interrupted != 0; }

}  // namespace headloom
