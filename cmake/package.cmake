# cpack: a Debian package of the program, the demo model, manual, completion and a systemd service (packages/debian).
set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME fourfold)
set(CPACK_PACKAGE_CONTACT "fourfold maintainers <maintainers@fourfold.invalid>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "inference engine and server for NVFP4 mixture-of-experts models")
set(CPACK_PACKAGE_DESCRIPTION
  "Loads Qwen3.5 and Qwen3.6 checkpoints in NVFP4, FP8 and bf16, runs them on CPUs and NVIDIA GPUs,
and serves them over the APIs of OpenAI and Anthropic. A small model comes with it.")
set(CPACK_DEBIAN_PACKAGE_SECTION science)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_COMPRESSION_TYPE xz)
set(CPACK_COMPONENTS_ALL program service)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_COMPONENTS_GROUPING ALL_COMPONENTS_IN_ONE)
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
set(debian ${PROJECT_SOURCE_DIR}/packages/debian)
file(WRITE ${CMAKE_CURRENT_BINARY_DIR}/debian/conffiles "/etc/default/fourfold\n")
set(CPACK_DEBIAN_PACKAGE_CONTROL_EXTRA
  ${debian}/postinst ${debian}/prerm ${debian}/postrm ${CMAKE_CURRENT_BINARY_DIR}/debian/conffiles)

# The service belongs to the package only: `cmake --install` leaves the system alone.
install(FILES ${debian}/fourfold.service DESTINATION /usr/lib/systemd/system COMPONENT service EXCLUDE_FROM_ALL)
install(FILES ${debian}/fourfold.sysusers DESTINATION /usr/lib/sysusers.d RENAME fourfold.conf
  COMPONENT service EXCLUDE_FROM_ALL)
install(FILES ${debian}/fourfold.default DESTINATION /etc/default RENAME fourfold COMPONENT service EXCLUDE_FROM_ALL)
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION share/doc/fourfold RENAME copyright COMPONENT program)

# cpack takes what was built; otherwise it would build the tests first.
set(CMAKE_SKIP_INSTALL_ALL_DEPENDENCY ON)
include(CPack)
