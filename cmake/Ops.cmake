# libheadloom_ops: the operators, a shared library that needs only ATen.
#
# Kernels (src/ops/*/kernel_cpu*.cpp) are torch-free and compiled once per instruction set;
# op.cpp chooses by at::get_cpu_capability(). They are always optimised: at -O0 helpers would leak as
# weak AVX-512 symbols.

file(GLOB_RECURSE ops_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/ops/*.cpp)
set(kernel_sources ${ops_sources})
list(FILTER kernel_sources INCLUDE REGEX "/kernel_cpu[^/]*\\.cpp$")
list(FILTER ops_sources EXCLUDE REGEX "/kernel_cpu[^/]*\\.cpp$")

# Which products are fast depends on the processor, whose name is the one thing taken from core.
add_library(headloom_ops SHARED ${ops_sources} ${PROJECT_SOURCE_DIR}/src/core/platform.cpp)
# For projects that link it, too.
target_include_directories(headloom_ops PUBLIC ${PROJECT_SOURCE_DIR}/src ${PROJECT_BINARY_DIR}/generated)
target_compile_features(headloom_ops PUBLIC cxx_std_20)
target_link_libraries(headloom_ops PUBLIC headloom_torch)
# Compiled once for everything that knows torch. A definition of the library's own would not fit the others.
target_precompile_headers(headloom_ops PRIVATE <ATen/ATen.h> <torch/library.h> <torch/nn/module.h>)
set_target_properties(headloom_ops PROPERTIES DEFINE_SYMBOL "")
add_dependencies(headloom_ops check_layers)
set_property(GLOBAL APPEND PROPERTY HEADLOOM_LAYERS headloom_ops)

function(headloom_kernel_set suffix)
  if(NOT kernel_sources)
    return()
  endif()
  add_library(headloom_kernels_${suffix} OBJECT ${kernel_sources})
  set_target_properties(headloom_kernels_${suffix} PROPERTIES UNITY_BUILD OFF)
  target_include_directories(headloom_kernels_${suffix} PRIVATE ${PROJECT_SOURCE_DIR}/src)
  target_compile_options(
    headloom_kernels_${suffix}
    PRIVATE -O3 -fno-math-errno -fno-trapping-math -Wno-uninitialized -fno-lto ${ARGN})
  target_sources(headloom_ops PRIVATE $<TARGET_OBJECTS:headloom_kernels_${suffix}>)
endfunction()

# The portable kernels use vectors of 16 bytes, which are NEON on aarch64. Where the processor can multiply
# and add in one rounding, the compiler would do so in one copy of an expression and not in the next, and
# results would depend on which of them runs: fma() in vec.h says where it is done.
set(default -DCPU_CAPABILITY=DEFAULT -ffp-contract=off)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  list(APPEND default -O1)  # taken by processors of before AVX2 alone: it shall be right, and soon compiled
endif()
headloom_kernel_set(default ${default})
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(avx2 -mavx2 -mfma -mf16c)
  set(avx512 -mavx512f -mavx512dq -mavx512vl -mavx512bw -mfma -mf16c)
  # Tiles are used where src/ops/kernel/capability.h finds them; a compiler uses none by itself.
  set(avx512_bf16 ${avx512} -mavx512bf16 -mavx512vnni -mamx-tile -mamx-bf16)
  if(HEADLOOM_EMULATION)
    set(avx512 ${avx2} -O1 -Wno-psabi -I${PROJECT_SOURCE_DIR}/tests/testing/avx512)
    set(avx512_bf16 ${avx512} -DHEADLOOM_EMULATE_BF16)
  endif()
  headloom_kernel_set(avx2 ${avx2} -DCPU_CAPABILITY=AVX2 -DCPU_CAPABILITY_AVX2)
  headloom_kernel_set(avx512 ${avx512} -DCPU_CAPABILITY=AVX512 -DCPU_CAPABILITY_AVX512)
  headloom_kernel_set(avx512_bf16 ${avx512_bf16} -DCPU_CAPABILITY=AVX512_BF16 -DCPU_CAPABILITY_AVX512)
endif()
