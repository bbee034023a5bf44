# Imports LibTorch from an installed PyTorch wheel as target headloom_torch (libtorch_cpu, libc10, OpenMP)
# and headloom_libtorch (the umbrella library, for executables). HEADLOOM_TORCH_CUDA is libtorch_cuda where
# PyTorch has it.
#
# find_package(Torch) is not used: on a CUDA wheel it demands a CUDA toolkit. HEADLOOM_TORCH_DIR (a
# folder with include/ and lib/) overrides the search.

if(NOT Python3_EXECUTABLE AND EXISTS ${PROJECT_SOURCE_DIR}/.venv/bin/python)
  set(Python3_EXECUTABLE ${PROJECT_SOURCE_DIR}/.venv/bin/python)  # what ./test set up
endif()
find_package(Python3 COMPONENTS Interpreter REQUIRED)

# -E sees the environment's packages under pip's build isolation too, which hides them by PYTHONPATH.
foreach(flags "" -E)
  if(NOT HEADLOOM_TORCH_DIR)
    execute_process(
      COMMAND ${Python3_EXECUTABLE} ${flags} -c
              "import importlib.util as u; s = u.find_spec('torch'); print(*(s.submodule_search_locations if s else []))"
      OUTPUT_VARIABLE HEADLOOM_TORCH_DIR
      OUTPUT_STRIP_TRAILING_WHITESPACE)
  endif()
endforeach()
if(NOT EXISTS "${HEADLOOM_TORCH_DIR}/lib/libtorch_cpu.so")
  message(FATAL_ERROR "PyTorch was not found by ${Python3_EXECUTABLE}. Install it there (./test puts it into "
                      ".venv), or set HEADLOOM_TORCH_DIR to the 'torch' folder of an install.")
endif()
set(HEADLOOM_TORCH_DIR "${HEADLOOM_TORCH_DIR}" CACHE PATH "torch folder of an installed PyTorch")

# PyTorch may be replaced in its place, by one with CUDA for example.
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${HEADLOOM_TORCH_DIR}/version.py")
file(STRINGS "${HEADLOOM_TORCH_DIR}/version.py" _version REGEX "^__version__")
string(REGEX MATCH "[0-9]+\\.[0-9]+(\\.[0-9]+)?" HEADLOOM_TORCH_VERSION "${_version}")
if(HEADLOOM_TORCH_VERSION VERSION_LESS 2.11)
  message(FATAL_ERROR "PyTorch ${HEADLOOM_TORCH_VERSION} found in ${HEADLOOM_TORCH_DIR}; 2.11 or newer is needed.")
endif()
message(STATUS "PyTorch ${HEADLOOM_TORCH_VERSION} in ${HEADLOOM_TORCH_DIR}")

add_library(headloom_torch INTERFACE)
foreach(name c10 torch_cpu torch)
  add_library(headloom_lib${name} SHARED IMPORTED)
  set_target_properties(headloom_lib${name} PROPERTIES IMPORTED_LOCATION
                                                    "${HEADLOOM_TORCH_DIR}/lib/lib${name}.so")
endforeach()
if(EXISTS "${HEADLOOM_TORCH_DIR}/lib/libtorch_cuda.so")
  message(STATUS "PyTorch has CUDA")
  set(HEADLOOM_TORCH_CUDA "${HEADLOOM_TORCH_DIR}/lib/libtorch_cuda.so")
endif()
target_include_directories(
  headloom_torch SYSTEM INTERFACE "${HEADLOOM_TORCH_DIR}/include"
                                  "${HEADLOOM_TORCH_DIR}/include/torch/csrc/api/include")
target_link_libraries(headloom_torch INTERFACE headloom_libtorch_cpu headloom_libc10)

# The OpenMP runtime that torch itself carries: a second one in the process would run single-threaded.
file(GLOB _gomp "${HEADLOOM_TORCH_DIR}/lib/libgomp*.so*" "${HEADLOOM_TORCH_DIR}/../torch.libs/libgomp*.so*")
if(_gomp)
  list(GET _gomp 0 _gomp)
  add_library(headloom_gomp SHARED IMPORTED)
  set_target_properties(headloom_gomp PROPERTIES IMPORTED_LOCATION "${_gomp}" IMPORTED_NO_SONAME TRUE)
  target_link_libraries(headloom_torch INTERFACE headloom_gomp)
else()
  target_link_libraries(headloom_torch INTERFACE gomp)
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL GNU)
  target_compile_options(headloom_torch INTERFACE -fopenmp)
else()
  target_compile_options(headloom_torch INTERFACE "SHELL:-include ${CMAKE_CURRENT_LIST_DIR}/clang_openmp.h")
endif()
