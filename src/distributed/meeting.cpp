#include "build.h"

#ifdef HEADLOOM_GLOO  // a PyTorch without it may lack all of c10d

#include "distributed/meeting.h"

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <c10/util/Logging.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "core/error.h"

namespace headloom {
namespace {

// What goes wrong is said in a sentence: c10d would write a stack of its own beside it.
void silence_c10d() {
  ::setenv("TORCH_CPP_LOG_LEVEL", "FATAL", /*overwrite=*/0);
  c10::initLogging();
}

void check_resolves(const Place& place, const std::string& here) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  const int error = ::getaddrinfo(place.address.c_str(), nullptr, &hints, &found);
  if (error != 0) {
    usage_error(here, ": MASTER_ADDR, where the ranks meet, is \"", place.address,
                "\", which is no address and no known host (", ::gai_strerror(error), ").");
  }
  ::freeaddrinfo(found);
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
  check_resolves(place, here);
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(place.port);
  options.isServer = place.rank == 0 && !place.served;
  options.waitWorkers = false;
  options.timeout = timeout;
  try {
    return part_of_job(c10::make_intrusive<c10d::TCPStore>(place.address, options), place.job);
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
}

}  // namespace headloom

#endif
