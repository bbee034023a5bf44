#include "train/interrupt.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <thread>

using namespace std::chrono_literals;

namespace headloom::test::interrupt_test {
namespace {

// A process with several threads, as one that trains is. It writes a byte once it can be
// interrupted, and ends with 0 when it has been.
[[noreturn]] void wait_for_an_interrupt(int ready) {
  install_interrupt_handler();
  std::atomic<int> started = 0;
  for (int thread = 0; thread < 3; ++thread) {
    std::thread([&] {
      ++started;
      for (;;) std::this_thread::sleep_for(1s);
    }).detach();
  }
  while (started < 3) std::this_thread::yield();
  if (::write(ready, "", 1) != 1) ::_exit(2);
  while (!interrupted()) std::this_thread::sleep_for(1ms);
  std::this_thread::sleep_for(2ms);  // the other signal's time
  ::_exit(0);
}

// The two signals may be handled by two threads of the process at the same time.
TEST(Interrupt, TwoSignalsOfOneRequestCountOnce) {
  for (int repetition = 0; repetition < 100; ++repetition) {
    int ready[2];
    ASSERT_EQ(::pipe(ready), 0);
    const pid_t process = ::fork();
    if (process == 0) wait_for_an_interrupt(ready[1]);
    ASSERT_GT(process, 0);
    ::close(ready[1]);
    char byte = 0;
    EXPECT_EQ(::read(ready[0], &byte, 1), 1);
    ::close(ready[0]);
    std::this_thread::sleep_for(300us);  // its main thread sleeps
    ::kill(process, SIGINT);
    ::kill(process, SIGTERM);
    int status = -1;
    ASSERT_EQ(::waitpid(process, &status, 0), process);
    ASSERT_EQ(status, 0) << "at repetition " << repetition;
  }
}

}  // namespace
}  // namespace headloom::test::interrupt_test
