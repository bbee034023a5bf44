// The store in which processes meet before they are connected: c10d's TCPStore.
#pragma once

#include <chrono>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "distributed/launcher.h"

namespace headloom {

// Serves a store on a port of this machine that is free.
c10::intrusive_ptr<c10d::TCPStore> serve_store();

// The part that belongs to the job of the store at place.address, and to this attempt at it; rank 0
// serves the store, unless the launcher does. Throws UsageError, with rank and host, for a name
// that does not resolve, for a port in use, and where nobody answers within `timeout`.
c10::intrusive_ptr<c10d::Store> open_store(const Place& place, std::chrono::milliseconds timeout);

// The same of a store that is there.
c10::intrusive_ptr<c10d::Store> part_of_job(const c10::intrusive_ptr<c10d::Store>& store,
                                            const std::string& job);

// The name of this machine.
std::string host_name();

}  // namespace headloom
