# Decides whether the CUDA module is built, and enables the CUDA language if so.
#   in:   JAX_FASTOPS_CUDA, Python_EXECUTABLE
#   out:  FASTOPS_BUILD_CUDA
#
# The compiler is, in this order: CMAKE_CUDA_COMPILER, $CUDACXX, nvcc on PATH, under $CUDA_HOME or
# $CUDA_PATH, under /usr/local/cuda, or from the nvidia-cuda-nvcc wheel in the interpreter's site-packages
# (under pip's build isolation, those of the environment that pip runs in).

set(FASTOPS_BUILD_CUDA OFF)
set(FASTOPS_CUDA_MODE "${JAX_FASTOPS_CUDA}")
if(FASTOPS_CUDA_MODE STREQUAL "")
  set(FASTOPS_CUDA_MODE AUTO)
endif()
string(TOUPPER "${FASTOPS_CUDA_MODE}" FASTOPS_CUDA_MODE)
if(NOT FASTOPS_CUDA_MODE MATCHES "^(AUTO|ON|OFF|1|0|TRUE|FALSE|YES|NO)$")
  message(FATAL_ERROR "JAX_FASTOPS_CUDA is ${JAX_FASTOPS_CUDA}; accepted are AUTO, ON and OFF")
endif()
if(NOT FASTOPS_CUDA_MODE STREQUAL "AUTO" AND NOT FASTOPS_CUDA_MODE)
  message(STATUS "CUDA module: off (JAX_FASTOPS_CUDA=${JAX_FASTOPS_CUDA})")
  return()
endif()

# A failed search is not cached, because a compiler may have been installed since.
if(NOT CMAKE_CUDA_COMPILER)
  unset(CMAKE_CUDA_COMPILER)
  unset(CMAKE_CUDA_COMPILER CACHE)
endif()

if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  fastops_python(wheel_dirs [[
import os, sys, sysconfig
dirs = [*sys.path, sysconfig.get_path('purelib'), sysconfig.get_path('platlib')]
dirs = [os.path.join(d, 'nvidia', 'cu13', 'bin') for d in dirs]
print(';'.join(d for d in dict.fromkeys(dirs) if os.path.isfile(os.path.join(d, 'nvcc'))))
]])
  unset(nvcc CACHE)
  find_program(nvcc nvcc NO_CACHE
    PATHS $ENV{CUDA_HOME}/bin $ENV{CUDA_PATH}/bin /usr/local/cuda/bin ${wheel_dirs}
    NO_CMAKE_PATH NO_CMAKE_ENVIRONMENT_PATH NO_CMAKE_SYSTEM_PATH NO_CMAKE_FIND_ROOT_PATH)
  if(nvcc)
    set(ENV{CUDACXX} "${nvcc}")
  endif()
endif()

# Architectures: machine code for A100 and H100, and PTX that the driver compiles for later ones.
if(NOT CMAKE_CUDA_ARCHITECTURES)
  if(NOT "$ENV{CUDAARCHS}" STREQUAL "")
    set(CMAKE_CUDA_ARCHITECTURES "$ENV{CUDAARCHS}")
  else()
    set(CMAKE_CUDA_ARCHITECTURES "80-real;90-real;90-virtual")
  endif()
endif()

# The wheels have the libraries in lib, but their nvcc searches lib64. The variable is for the compiler
# checks. CMake stores their results, so the build itself does not need it.
set(fastops_nvcc "${CMAKE_CUDA_COMPILER}")
if(NOT fastops_nvcc)
  set(fastops_nvcc "$ENV{CUDACXX}")
endif()
get_filename_component(fastops_nvcc "${fastops_nvcc}" REALPATH)
get_filename_component(fastops_cuda_root "${fastops_nvcc}/../.." ABSOLUTE)
if(fastops_cuda_root MATCHES "/nvidia/cu[0-9]+$")
  set(ENV{NVCC_APPEND_FLAGS} "$ENV{NVCC_APPEND_FLAGS} -L\"${fastops_cuda_root}/lib\"")
endif()

# Tries the compiler in a separate project, so that a broken compiler is not an error here.
include(CheckLanguage)
check_language(CUDA)
if(CMAKE_CUDA_COMPILER)
  enable_language(CUDA)
  set(FASTOPS_BUILD_CUDA ON)
  message(STATUS "CUDA module: ${CMAKE_CUDA_COMPILER} (${CMAKE_CUDA_COMPILER_VERSION}) for ${CMAKE_CUDA_ARCHITECTURES}")
elseif(NOT FASTOPS_CUDA_MODE STREQUAL "AUTO")
  message(FATAL_ERROR
    "JAX_FASTOPS_CUDA is ON, and no working CUDA compiler was found (tried: '${fastops_nvcc}'). "
    "Set CUDACXX to an nvcc, or install one, in the checkout, with: pip install '.[cuda-build]'")
elseif("$ENV{CUDACXX}" STREQUAL "")
  message(STATUS "CUDA module: no CUDA compiler found; building only the CPU module")
else()
  message(WARNING
    "${fastops_nvcc} was found but does not work; building only the CPU module. "
    "JAX_FASTOPS_CUDA=ON makes this an error; CMakeFiles/CMakeConfigureLog.yaml has the details.")
endif()
