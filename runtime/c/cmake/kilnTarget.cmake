# kiln::kiln is the library in the form that the including project builds its own in.
if(NOT TARGET kiln::kiln)
  add_library(kiln::kiln INTERFACE IMPORTED)
  if(BUILD_SHARED_LIBS)
    set_target_properties(kiln::kiln PROPERTIES INTERFACE_LINK_LIBRARIES kiln::shared)
  else()
    set_target_properties(kiln::kiln PROPERTIES INTERFACE_LINK_LIBRARIES kiln::static)
  endif()
endif()
