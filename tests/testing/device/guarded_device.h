// A device for tests that lives in the memory of the CPU and behaves like an accelerator.
//
// PyTorch knows it as "guarded" (its device type is PrivateUse1), and there are two: "guarded:0"
// and "guarded:1". Its tensors lie at addresses that the host cannot read, so that code which takes
// a tensor's data_ptr() and follows it ends the process with a sentence. Its operators are ATen's
// for the CPU, which see the same memory at another address. An operator refuses tensors of two
// devices and generators of another one, as those of CUDA do, except that this device is stricter:
// a CPU tensor without dimensions is refused as well, unless it stands for a number in the source.
//
// Linking or loading the library registers the device, unless the tests run on a real one: PyTorch
// has one type of accelerator at a time. Python: see tests/python/test_devices.py.
#pragma once

#include <cstdint>
#include <string>

namespace headloom::test {

// The device that the tests run on: HEADLOOM_TEST_DEVICE ("cuda", for example), or "guarded:1".
std::string test_device();
// Whether that is the guarded one.
bool on_guarded_device();

// How often the host has waited for a device so far: it read a value, copied a tensor from a device
// or asked for a result whose size depends on values. Of both devices and all threads.
int64_t host_reads();
// How many operators ran on the devices so far.
int64_t device_operators();

}  // namespace headloom::test
