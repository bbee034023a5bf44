#include "build.h"

#ifdef HEADLOOM_GLOO  // a PyTorch without it may lack all of c10d

#include "distributed/meeting.h"

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <c10/util/Logging.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <functional>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "core/error.h"
#include "core/text.h"

namespace headloom {
namespace {

// What goes wrong is said in a sentence: c10d would write a stack of its own beside it.
void silence_c10d() {
  ::setenv("TORCH_CPP_LOG_LEVEL", "FATAL", /*overwrite=*/0);
  c10::initLogging();
}

using std::chrono::milliseconds;
using Store = c10::intrusive_ptr<c10d::Store>;

// Calls `done` until it is true or `timeout` is over. Returns whether it is.
bool wait_for(milliseconds timeout, const std::function<bool()>& done) {
  const auto end = std::chrono::steady_clock::now() + timeout;
  while (!done()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(milliseconds(50));
  }
  return true;
}

bool may_be_known_later(int error) {
#ifdef EAI_NODATA
  if (error == EAI_NODATA) return true;
#endif
  return error == EAI_AGAIN || error == EAI_NONAME;
}

// The name of a container is known once the container runs, which may be after this one.
void check_resolves(const Place& place, milliseconds timeout, const std::string& here) {
  constexpr milliseconds kLongest = std::chrono::minutes(1);
  int error = 0;
  const auto resolves = [&] {
    addrinfo hints{}, *found = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    error = ::getaddrinfo(place.address.c_str(), nullptr, &hints, &found);
    if (error == 0) ::freeaddrinfo(found);
    return !may_be_known_later(error);
  };
  if (!wait_for(milliseconds(500), resolves)) {
    std::fprintf(stderr, "headloom: %s waits until \"%s\" is a known host (MASTER_ADDR)\n",
                 here.c_str(), place.address.c_str());
    wait_for(std::min(timeout, kLongest), resolves);
  }
  if (error == 0) return;
  usage_error(here, ": MASTER_ADDR, where the ranks meet, is \"", place.address,
              "\", which is no address and no known host (", ::gai_strerror(error), ").");
}

// "" where there is no such key.
std::string text_at(const Store& store, const std::string& key) {
  if (!store->check({key})) return "";
  const std::vector<uint8_t> bytes = store->get(key);
  return {bytes.begin(), bytes.end()};
}

// torchrun serves one store for all attempts at a job, and its agents count attempts each for
// itself. So rank 0 draws a name for this attempt, and another rank takes part in it once rank 0
// has answered: the name that it finds may be that of an attempt before.
Store part_of_attempt(const Store& store, const Place& place, milliseconds timeout,
                      const std::string& here) {
  const std::string own = str(host_name(), "/", ::getpid(), "/",
                              std::chrono::system_clock::now().time_since_epoch().count());
  const auto key = [](const char* what, int64_t rank) { return str(what, "/", rank); };
  Store attempt;
  std::vector<int64_t> left = {0};
  const auto all_are_here = [&] {
    if (place.rank == 0) {
      left.clear();
      for (int64_t rank = 1; rank < place.size; ++rank) {
        // It may have been started anew since it asked.
        const std::string asks = text_at(attempt, key("asks", rank));
        asks.empty() ? left.push_back(rank) : attempt->set(key("answer", rank), asks);
      }
      return left.empty();
    }
    const std::string name = text_at(store, "attempt");
    if (name.empty()) return false;
    attempt = c10::make_intrusive<c10d::PrefixStore>(name, store);
    attempt->set(key("asks", place.rank), own);
    return text_at(attempt, key("answer", place.rank)) == own;
  };
  if (place.rank == 0) {
    attempt = c10::make_intrusive<c10d::PrefixStore>(own, store);
    store->set("attempt", own);
  }
  if (wait_for(timeout, all_are_here)) return attempt;
  std::vector<std::string> names;
  for (const int64_t rank : left) names.push_back(str("rank ", rank));
  usage_error(here, ": ", join(names, " and "), names.size() > 1 ? " have" : " has",
              " not come within ", std::chrono::duration<double>(timeout).count(),
              " seconds; are all ranks started?");
}

}  // namespace

std::string host_name() {
  std::array<char, 256> host{};
  ::gethostname(host.data(), host.size() - 1);
  return host.data();
}

c10::intrusive_ptr<c10d::TCPStore> serve_store() {
  silence_c10d();
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
}

c10::intrusive_ptr<c10d::Store> part_of_job(const c10::intrusive_ptr<c10d::Store>& store,
                                            const std::string& job) {
  return c10::make_intrusive<c10d::PrefixStore>("headloom" + job, store);
}

c10::intrusive_ptr<c10d::Store> open_store(const Place& place, std::chrono::milliseconds timeout) {
  silence_c10d();
  const std::string here = str("rank ", place.rank, " on host ", host_name());
  check_resolves(place, timeout, here);
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(place.port);
  options.isServer = place.rank == 0 && !place.served;
  options.waitWorkers = false;
  options.timeout = timeout;
  Store store;
  try {
    store = part_of_job(c10::make_intrusive<c10d::TCPStore>(place.address, options), place.job);
  } catch (const std::exception& error) {
    if (!options.isServer) {
      usage_error(here, ": nobody answers at ", place.address, ", port ", place.port, ", within ",
                  std::chrono::duration<double>(timeout).count(),
                  " seconds; is rank 0 started, and is the port open (MASTER_ADDR, MASTER_PORT)?");
    }
    const bool in_use = std::string(error.what()).find("EADDRINUSE") != std::string::npos ||
                        std::string(error.what()).find("in use") != std::string::npos;
    usage_error(here, ": the port ", place.port, in_use ? " is in use" : " cannot be opened",
                "; choose another one with MASTER_PORT for all ranks.");
  }
  return place.served && !place.ours ? part_of_attempt(store, place, timeout, here) : store;
}

}  // namespace headloom

#endif
