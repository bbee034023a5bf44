#include "train/interrupt.h"

#include <csignal>

namespace headloom {

static volatile std::sig_atomic_t g_interrupts = 0;

static volatile std::sig_atomic_t g_requeue = 0;

static void on_announcement(int) {
  g_requeue = 1;
  if (g_interrupts == 0) g_interrupts = 1;
}

static void on_interrupt(int signal) {
  g_interrupts = g_interrupts + 1;
  if (g_interrupts > 1) {
    std::signal(signal, SIG_DFL);
    std::raise(signal);
  }
}

void install_interrupt_handler() {
  std::signal(SIGINT, on_interrupt);
  std::signal(SIGTERM, on_interrupt);
  std::signal(SIGUSR1, on_announcement);
}

bool to_be_requeued() { return g_requeue != 0; }

bool interrupted() { return g_interrupts > 0; }

}  // namespace headloom
