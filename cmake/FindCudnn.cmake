# Finds the headers for attention by cuDNN: those of cuDNN, and those of NVIDIA's cudnn-frontend.
#   in:   JAX_FASTOPS_CUDNN_INCLUDE, JAX_FASTOPS_CUDNN_FRONTEND_INCLUDE, fastops_python, fastops_header_version
#   out:  FASTOPS_CUDNN_VERSION (empty if one of them is missing), FASTOPS_CUDNN_FRONTEND_VERSION,
#         FASTOPS_CUDNN_INCLUDE_DIRS
#
# A folder that is not given is that of the wheel nvidia-cudnn-cu13 or nvidia-cudnn-frontend, in the interpreter's
# site-packages (under pip's build isolation, also in those of the environment that pip runs in). The library
# is not needed: the module takes the one that JAX has loaded.

set(JAX_FASTOPS_CUDNN_INCLUDE "$ENV{JAX_FASTOPS_CUDNN_INCLUDE}" CACHE PATH "The folder with cudnn.h")
set(JAX_FASTOPS_CUDNN_FRONTEND_INCLUDE "$ENV{JAX_FASTOPS_CUDNN_FRONTEND_INCLUDE}" CACHE PATH
  "The folder with cudnn_frontend.h")
fastops_python(site_dirs [[
import sys, sysconfig
print(';'.join(dict.fromkeys([*sys.path, sysconfig.get_path('purelib'), sysconfig.get_path('platlib')])))
]])
set(cudnn_dirs ${site_dirs})
list(TRANSFORM cudnn_dirs APPEND /nvidia/cudnn/include)
set(frontend_dirs ${site_dirs})
list(TRANSFORM frontend_dirs APPEND /include)
find_path(cudnn_include cudnn_version.h NO_CACHE NO_DEFAULT_PATH
  PATHS ${JAX_FASTOPS_CUDNN_INCLUDE} ${cudnn_dirs} /usr/include /usr/local/cuda/include)
find_path(frontend_include cudnn_frontend.h NO_CACHE NO_DEFAULT_PATH
  PATHS ${JAX_FASTOPS_CUDNN_FRONTEND_INCLUDE} ${frontend_dirs} /usr/include /usr/local/include)

set(FASTOPS_CUDNN_VERSION "")
if(cudnn_include AND frontend_include)
  set(FASTOPS_CUDNN_INCLUDE_DIRS ${frontend_include} ${cudnn_include})
  fastops_header_version(FASTOPS_CUDNN_VERSION "${cudnn_include}/cudnn_version.h"
    CUDNN_MAJOR CUDNN_MINOR CUDNN_PATCHLEVEL)
  fastops_header_version(FASTOPS_CUDNN_FRONTEND_VERSION "${frontend_include}/cudnn_frontend_version.h"
    CUDNN_FRONTEND_MAJOR_VERSION CUDNN_FRONTEND_MINOR_VERSION CUDNN_FRONTEND_PATCH_VERSION)
endif()
if(FASTOPS_CUDNN_VERSION MATCHES "^9\\.")
  message(STATUS "Attention by cuDNN: headers ${FASTOPS_CUDNN_VERSION} in ${cudnn_include}")
else()
  set(FASTOPS_CUDNN_VERSION "")
  message(STATUS "No attention by cuDNN: needs the headers of cuDNN 9 (nvidia-cudnn-cu13: ${cudnn_include}) and "
    "cudnn-frontend (nvidia-cudnn-frontend: ${frontend_include})")
endif()
