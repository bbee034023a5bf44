// The checksum of files: PyTorch's CRC-64 (Jones' polynomial), as c10::crc64 computes it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace headloom {

// The checksum of bytes whose own checksum is `sum`, followed by the `size` bytes at `data`. That
// of no bytes is 0.
uint64_t crc64(uint64_t sum, const void* data, size_t size);

// The same without the processor's carry-less products.
uint64_t crc64_by_tables(uint64_t sum, const void* data, size_t size);

}  // namespace headloom
