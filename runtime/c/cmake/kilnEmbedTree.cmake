# kiln_embed_tree(<target> <tree> [TARGETS <sm_90a|cpu-x86_64|...>...] [NAME <symbol>])
#
# Links the artifact tree in the folder <tree> into <target>, as the ustar archive that kiln_root.archive takes, and
# lets its sources say
#
#   #include <kiln_embedded_tree.h>
#   kiln_root root = {.archive = kiln_embedded_tree, .archive_bytes = kiln_embedded_tree_size};
#   kiln_options options = {.roots = &root, .root_count = 1};
#
# TARGETS are those of the tree's to take; all by default. NAME stands for kiln_embedded_tree where one program holds
# several trees; the symbols are hidden, so libraries of one process don't meet. Needs no tool but the compiler. The
# same tree gives the same bytes: entries are sorted and have no owner, mode or time of the file system's.

function(kiln_embed_tree target tree)
  cmake_parse_arguments(PARSE_ARGV 2 arg "" "NAME" "TARGETS")
  if(arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "kiln_embed_tree: found ${arg_UNPARSED_ARGUMENTS}, "
      "expected kiln_embed_tree(target tree [TARGETS t...] [NAME symbol])")
  endif()
  set(name kiln_embedded_tree)
  if(arg_NAME)
    set(name "${arg_NAME}")
  endif()
  get_filename_component(tree "${tree}" ABSOLUTE)
  _kiln_tree_files(files "${tree}" ${arg_TARGETS})
  set(entries "")
  set(paths "")
  foreach(file IN LISTS files)
    _kiln_tar_entry(entry "${tree}" "${file}")
    string(APPEND entries "${entry}")
    list(APPEND paths "${tree}/${file}")
  endforeach()
  _kiln_language(extension)
  set(folder "${CMAKE_CURRENT_BINARY_DIR}/kiln_embed/${target}")
  configure_file("${CMAKE_CURRENT_FUNCTION_LIST_DIR}/kilnEmbeddedTree.h.in" "${folder}/${name}.h" @ONLY)
  configure_file("${CMAKE_CURRENT_FUNCTION_LIST_DIR}/kilnEmbeddedTree.c.in" "${folder}/${name}.${extension}" @ONLY)
  # INDEX.json pins every other file: when it changes, sizes and checksums are made anew.
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${tree}/INDEX.json")
  # An archive of LTO objects does not list the symbols of assembly. Strings as long as this are no ISO C.
  set_source_files_properties("${folder}/${name}.${extension}" TARGET_DIRECTORY ${target}
    PROPERTIES OBJECT_DEPENDS "${paths}" COMPILE_OPTIONS "-fno-lto;-w")
  target_sources(${target} PRIVATE "${folder}/${name}.${extension}")
  target_include_directories(${target} PUBLIC "$<BUILD_INTERFACE:${folder}>")
endfunction()

# The files to embed, relative to the tree: INDEX.json, then each target's. Evidence is for people.
function(_kiln_tree_files result tree)
  if(NOT EXISTS "${tree}/INDEX.json")
    message(FATAL_ERROR "kiln_embed_tree: no INDEX.json in ${tree}; give the folder of a built tree")
  endif()
  set(files INDEX.json)
  set(targets ${ARGN})
  if(NOT targets)
    file(GLOB manifests RELATIVE "${tree}" "${tree}/*/MANIFEST.json")
    string(REPLACE "/MANIFEST.json" "" targets "${manifests}")
  endif()
  foreach(one IN LISTS targets)
    if(NOT EXISTS "${tree}/${one}/MANIFEST.json")
      message(FATAL_ERROR "kiln_embed_tree: ${tree} has no target ${one}")
    endif()
    file(GLOB own LIST_DIRECTORIES false RELATIVE "${tree}" "${tree}/${one}/*")
    list(REMOVE_ITEM own "${one}/EVIDENCE.json")
    list(APPEND files ${own})
  endforeach()
  set(${result} "${files}" PARENT_SCOPE)
endfunction()

# A call of the macro KILN_FILE: name, zeros behind it, size and checksum in octal, path.
function(_kiln_tar_entry result tree file)
  string(LENGTH "${file}" length)
  if(length GREATER 100)
    message(FATAL_ERROR "kiln_embed_tree: ${file} is longer than the 100 characters of an archive's names")
  endif()
  math(EXPR padding "100 - ${length}")
  file(SIZE "${tree}/${file}" bytes)
  _kiln_octal(size ${bytes} 11)
  # 2509 is the sum of the fields that are the same in every header, its own counted as spaces.
  string(HEX "${file}${size}" hex)
  string(REGEX REPLACE "(..)" "+0x\\1" sum "${hex}")
  math(EXPR sum "2509${sum}")
  _kiln_octal(checksum ${sum} 6)
  string(REGEX REPLACE "([\"\\\\])" "\\\\\\\\\\\\\\1" path "${tree}/${file}")
  set(${result} "  KILN_FILE(\"${file}\", \"${padding}\", \"${size}\", \"${checksum}\", \"${path}\")\n" PARENT_SCOPE)
endfunction()

function(_kiln_octal result value digits)
  set(text "")
  foreach(i RANGE 1 ${digits})
    math(EXPR digit "${value} % 8")
    math(EXPR value "${value} / 8")
    string(PREPEND text "${digit}")
  endforeach()
  set(${result} "${text}" PARENT_SCOPE)
endfunction()

# The suffix of a language that the project has anyway.
function(_kiln_language result)
  get_property(languages GLOBAL PROPERTY ENABLED_LANGUAGES)
  if("C" IN_LIST languages)
    set(${result} c PARENT_SCOPE)
  elseif("CXX" IN_LIST languages)
    set(${result} cpp PARENT_SCOPE)
  else()
    message(FATAL_ERROR "kiln_embed_tree: enable the language C or CXX")
  endif()
endfunction()
