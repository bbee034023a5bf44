# Sets HEADLOOM_GLOO where this PyTorch has gloo, with which the processes of a distributed run talk.
# cmake/gloo declares what PyTorch's header takes from gloo's own headers, which the wheel lacks.
include(CheckCXXSourceCompiles)
set(CMAKE_REQUIRED_INCLUDES "${PROJECT_SOURCE_DIR}/cmake/gloo" "${HEADLOOM_TORCH_DIR}/include"
                            "${HEADLOOM_TORCH_DIR}/include/torch/csrc/api/include")
set(CMAKE_REQUIRED_LIBRARIES "${HEADLOOM_TORCH_DIR}/lib/libtorch_cpu.so" "${HEADLOOM_TORCH_DIR}/lib/libc10.so")
set(CMAKE_REQUIRED_LINK_OPTIONS "-Wl,--allow-shlib-undefined")
set(CMAKE_REQUIRED_FLAGS "-std=c++20 -O0")
check_cxx_source_compiles("
#define USE_C10D_GLOO
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
int main() { return c10d::ProcessGroupGloo::createDeviceForHostname(\"localhost\") ? 0 : 1; }
" HEADLOOM_GLOO)
foreach(setting INCLUDES LIBRARIES LINK_OPTIONS FLAGS)
  unset(CMAKE_REQUIRED_${setting})
endforeach()
if(NOT HEADLOOM_GLOO)
  message(STATUS "This PyTorch has no gloo: training on several processes will not be possible.")
endif()
