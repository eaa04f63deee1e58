# Adds an SBOM (CycloneDX) to the wheel, where PEP 770 has it: what is compiled into the native modules.
#   in:   fastops_header_version, FASTOPS_BUILD_CUDA, FASTOPS_CUDNN_VERSION, FASTOPS_CUDNN_FRONTEND_VERSION,
#         FASTOPS_JAXLIB_VERSION, FASTOPS_NEWER_JAXLIB_VERSION

set(components "")
macro(fastops_component name version license purl)
  string(APPEND components "${comma}
    {\"type\": \"library\", \"name\": \"${name}\", \"version\": \"${version}\",
     \"licenses\": [{\"expression\": \"${license}\"}], \"purl\": \"pkg:${purl}@${version}\"}")
  set(comma ",")
endmacro()

fastops_component(nanobind "${nanobind_VERSION}" BSD-3-Clause pypi/nanobind)
fastops_header_version(version "${NB_DIR}/ext/robin_map/include/tsl/robin_growth_policy.h"
  TSL_RH_VERSION_MAJOR TSL_RH_VERSION_MINOR TSL_RH_VERSION_PATCH)
fastops_component(robin_map "${version}" MIT github/Tessil/robin-map)
fastops_component("XLA FFI headers" ${FASTOPS_JAXLIB_VERSION} Apache-2.0 pypi/jaxlib)
fastops_component("XLA FFI headers" ${FASTOPS_NEWER_JAXLIB_VERSION} Apache-2.0 pypi/jaxlib)
if(FASTOPS_BUILD_CUDA)
  fastops_component("CUDA toolkit" "${CMAKE_CUDA_COMPILER_VERSION}" LicenseRef-NVIDIA-CUDA-EULA generic/cuda-toolkit)
  if(FASTOPS_CUDNN_VERSION)
    fastops_component(cudnn-frontend ${FASTOPS_CUDNN_FRONTEND_VERSION} MIT pypi/nvidia-cudnn-frontend)
  endif()
endif()
if(CMAKE_MODULE_LINKER_FLAGS MATCHES "-static-libstdc")
  fastops_component(libstdc++ "${CMAKE_CXX_COMPILER_VERSION}" "GPL-3.0-or-later WITH GCC-exception-3.1" generic/gcc)
endif()

file(WRITE "${CMAKE_BINARY_DIR}/native.cdx.json" "{
  \"bomFormat\": \"CycloneDX\", \"specVersion\": \"1.6\", \"version\": 1,
  \"metadata\": {\"component\": {
    \"type\": \"library\", \"name\": \"${SKBUILD_PROJECT_NAME}\", \"version\": \"${SKBUILD_PROJECT_VERSION_FULL}\"}},
  \"components\": [${components}]
}
")
install(FILES "${CMAKE_BINARY_DIR}/native.cdx.json" COMPONENT plugin DESTINATION "${SKBUILD_METADATA_DIR}/sboms")
