// What Linux and glibc alone know: memory of the process, the allocator, the processor's name.
// Other systems get the answer "unknown", or nothing happens.
#pragma once

#include <cstdint>
#include <string>

namespace headloom {

// A field of the process's memory ("VmRSS" resident, "VmHWM" its peak) in bytes, or -1.
int64_t process_memory(const std::string& field);
// Makes VmHWM what is resident now. Returns whether that is possible.
bool reset_peak_memory();

// Gives back to the system what the allocator keeps for later.
void release_free_memory();
// Lets the allocator keep for later whatever is freed, by this thread and by those that begin after
// it. By default glibc gives 32 MB and more back at every free, and the next tensor faults its
// pages in again. Returns whether that is possible.
bool keep_freed_memory();
// After keep_freed_memory(): but for blocks of 32 MiB and more. Where such blocks come and go in
// ever other sizes, as the caches of a server's texts do, what is kept would not fit them.
void return_large_blocks();
// Back to the default, but that threads still share what they free.
void return_freed_memory();

// Pages of memory that the system has given to this process so far, each zeroed first; 0 where it
// does not say.
int64_t page_faults();

// "Intel(R) Xeon(R) Processor @ 2.50GHz", or "unknown".
std::string processor_name();
// A number that the running system has drawn as it started, and what tells the control groups of
// this process from others; "" where the system does not say.
std::string boot_id();
std::string control_groups();
// The file of the running program, for starting it again; also for a child process.
std::string program_path();

}  // namespace headloom
