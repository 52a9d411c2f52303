"""The bad inputs that loaders and command line must survive, and the tests that bring each of them."""

from typing import NamedTuple


class BadInput(NamedTuple):
    """One bad input.

    Attributes:
        what: it, in a few words.
        python: tests of the Python side, as "folder/file::test" without "test_" and ".py".
        c: tests of libkiln, or why it cannot meet this one.
    """

    what: str
    python: str
    c: str


BUILDER = "libkiln reads trees and writes none"
COMMAND = "libkiln has no command line"

_LOAD = "runtime/load::file_of_another_kind_is_refused"
_C_LOAD = "runtime/c/load::file_of_another_kind_is_refused"
_HARM = "runtime/verify::harm_is_found_where_it_was_done"
_C_HARM = "runtime/c/trees::harm_is_found_where_it_was_done"
_JSON, _C_JSON = "runtime/strictjson::refused", "runtime/c/json::bad_json_is_refused"
_LIE = "runtime/manifest::contradiction_is_refused"
_C_LIE = "runtime/c/documents::contradictions_are_refused_with_the_same_words"
_C_FIELD = "runtime/c/documents::every_value_of_another_kind_has_the_same_verdict"
_NAME = "runtime/manifest::hostile_file_names_are_refused"
_C_NAME = "runtime/c/documents::file_names_have_the_same_verdict"
_CUBIN, _C_CUBIN = "runtime/cubin::damage_is_named", "runtime/c/artifacts::damage_is_named"
_FALSE, _C_FALSE = "runtime/proof::false_entries_are_told", "runtime/c/artifacts::false_entries_are_told"
_MISUSE, _C_MISUSE = "runtime/call::misuse_is_refused_by_name", "runtime/c/calls::misuse_is_refused_by_name"
_CUDA, _C_CUDA = "runtime/cuda::misuse_never_reaches_a_launch", "runtime/c/cuda_calls::selects_and_refuses"
_GONE = "runtime/c/bad_input::streams_and_contexts_that_are_gone"
_SWAP = "runtime/bad_input::files_that_change_while_they_are_read"
_C_SWAP = "runtime/c/bad_input::files_that_change_while_they_are_read"

TREES = {
    1: BadInput("a path that is not there", "runtime/load::root_that_is_no_folder",
                "runtime/c/load::root_that_is_no_folder"),
    2: BadInput("a file where a folder is expected", "runtime/load::root_that_is_no_folder",
                "runtime/c/load::root_that_is_no_folder"),
    3: BadInput("an empty folder", "runtime/load::root_that_is_no_folder",
                "runtime/c/load::root_that_is_no_folder"),
    4: BadInput("no manifest", f"{_LOAD} {_HARM}", f"{_C_LOAD} {_C_HARM}"),
    5: BadInput("an empty manifest", f"{_LOAD} runtime/verify::cut_and_extended_files_are_found", _C_LOAD),
    6: BadInput("a folder as manifest", f"{_LOAD} {_HARM}", f"{_C_LOAD} {_C_HARM}"),
    7: BadInput("a pipe as manifest", f"{_LOAD} {_HARM}", f"{_C_LOAD} {_C_HARM}"),
    8: BadInput("a manifest that is a link", f"{_LOAD} {_HARM}",
                f"{_C_LOAD} runtime/c/trees::links_to_the_right_bytes_are_faults"),
    9: BadInput("a file this user may not read", "runtime/load::unreadable_tree",
                "runtime/c/load::unreadable_tree"),
    10: BadInput("a sparse file of gigabytes", f"{_LOAD} {_HARM}", f"{_C_LOAD} {_C_HARM}"),
    11: BadInput("a read-only system", "runtime/load::read_only_system_without_home",
                 "runtime/c/load::read_only_system_without_home"),
    12: BadInput("a listed file that is missing", f"{_LOAD} {_HARM}", f"{_C_LOAD} {_C_HARM}"),
    13: BadInput("a file that is not listed", f"runtime/load::unlisted_file_is_ignored {_HARM}",
                 f"runtime/c/load::unlisted_file_is_ignored {_C_HARM}"),
    14: BadInput("a folder, pipe, socket or device as artifact", _LOAD, _C_LOAD),
    15: BadInput("links: outwards, dangling, in a circle, of folders",
                 f"{_LOAD} runtime/load::folder_of_a_target_may_be_no_link",
                 f"{_C_LOAD} runtime/c/load::folder_of_a_target_may_be_no_link"),
    16: BadInput("an empty artifact", f"{_LOAD} runtime/verify::kinds_of_faults", _C_LOAD),
    17: BadInput("a file cut at any length",
                 "runtime/load::every_length_of_an_index_and_every_flipped_byte "
                 "runtime/cubin::every_truncation_and_extension_is_refused",
                 "runtime/c/load::every_length_of_an_index_and_every_flipped_byte "
                 "runtime/c/artifacts::every_truncation_and_extension_is_refused"),
    18: BadInput("one byte too many", "runtime/load::changed_bytes_are_refused",
                 "runtime/c/load::changed_bytes_are_refused"),
    19: BadInput("one bit flipped",
                 "runtime/load::changed_bytes_are_refused runtime/verify::every_flipped_byte_is_found",
                 "runtime/c/load::changed_bytes_are_refused "
                 "runtime/c/trees::flipped_bytes_are_found_in_every_kind_of_file"),
    20: BadInput("two files in each other's place", f"runtime/load::swapped_files {_HARM}",
                 f"runtime/c/load::swapped_files {_C_HARM}"),
    21: BadInput("the same, with their digests",
                 "runtime/load::swapped_files_with_their_hashes "
                 "runtime/proof::swapped_files_are_told_even_with_their_digests_swapped",
                 "runtime/c/load::swapped_files_with_their_hashes "
                 "runtime/c/trees::right_digests_of_wrong_contents_are_found"),
    22: BadInput("a file replaced between check and use",
                 f"runtime/load::artifact_replaced_between_check_and_load {_SWAP}", _C_SWAP),
    23: BadInput("a file cut while it is read", f"runtime/load::artifact_truncated_while_reading {_SWAP}",
                 _C_SWAP),
    24: BadInput("what a killed build leaves",
                 f"runtime/load::unlisted_file_is_ignored {_HARM} "
                 "compiler/tree::a_killed_swap_is_undone_by_the_next_builder",
                 f"runtime/c/load::unlisted_file_is_ignored {_C_HARM}"),
    25: BadInput("two builders at once", "compiler/tree::concurrent_builders_leave_one_of_their_trees",
                 BUILDER),
    26: BadInput("a disk that is full half-way or at the end",
                 "compiler/tree::a_full_disk_leaves_the_old_tree "
                 "compiler/tree::an_error_of_any_system_call_leaves_the_old_tree", BUILDER),
}  # fmt: skip

TEXTS = {
    27: BadInput("no JSON", _JSON, _C_JSON),
    28: BadInput("JSON of another kind than an object", "runtime/manifest::other_top_types_are_refused",
                 "runtime/c/documents::other_top_types_have_the_same_verdict"),
    29: BadInput("more after the document", _JSON, _C_JSON),
    30: BadInput("byte order marks and other encodings", _JSON, _C_JSON),
    31: BadInput("bytes that are no UTF-8", _JSON, _C_JSON),
    32: BadInput("NUL bytes", _JSON, _C_JSON),
    33: BadInput("half of a surrogate pair", _JSON, _C_JSON),
    34: BadInput("a key twice", _JSON, f"{_C_JSON} runtime/c/json::json_caps"),
    35: BadInput("a hundred thousand nested lists", _JSON, _C_JSON),
    36: BadInput("a million keys or entries", "runtime/strictjson::size_and_count_caps",
                 "runtime/c/json::json_caps"),
    37: BadInput("an integer of thousands of digits", _JSON, _C_JSON),
    38: BadInput("no finite number", _JSON, _C_JSON),
    39: BadInput("sizes that are none", f"{_JSON} {_LIE}", f"{_C_JSON} {_C_LIE}"),
    40: BadInput("another version of the format", _LIE, _C_LIE),
    41: BadInput("a field too many", "runtime/manifest::every_unknown_field_is_refused", _C_FIELD),
    42: BadInput("a field too few", "runtime/manifest::every_missing_field_is_refused", _C_FIELD),
    43: BadInput("a field of another type", "runtime/manifest::every_field_of_another_type_is_refused",
                 _C_FIELD),
    44: BadInput("no kernels", _LIE, _C_LIE),
    45: BadInput("kernels or paths twice, or but for their case",
                 f"runtime/manifest::duplicates_are_refused {_NAME}",
                 f"runtime/c/documents::order_and_identity_have_the_same_verdict {_C_NAME}"),
    46: BadInput("digests that are none", _LIE, _C_LIE),
    47: BadInput("the digest of nothing", "runtime/bad_input::the_digest_of_nothing",
                 "runtime/c/bad_input::the_digest_of_nothing"),
    48: BadInput("another target's manifest", f"runtime/load::manifest_of_another_target {_HARM}",
                 f"runtime/c/load::manifest_of_another_target {_C_HARM}"),
    49: BadInput("a tree of an older generation",
                 "runtime/load::pins runtime/load::old_manifest_with_a_new_index",
                 "runtime/c/load::pins runtime/c/load::old_manifest_with_a_new_index"),
    50: BadInput("a target in another's folder; carriage returns", f"{_LIE} {_JSON}", f"{_C_LIE} {_C_JSON}"),
}  # fmt: skip

NAMES = {
    51: BadInput("names that leave the folder", _NAME, _C_NAME),
    52: BadInput("names without a name", _NAME, _C_NAME),
    53: BadInput("names with control characters, or too long",
                 f"{_NAME} {_HARM} runtime/load::root_that_is_no_folder",
                 f"{_C_NAME} {_C_HARM} runtime/c/load::root_that_is_no_folder"),
    54: BadInput("names that are devices elsewhere", _NAME, _C_NAME),
    55: BadInput("names that look the same", _NAME, _C_NAME),
    56: BadInput("names that are options", _NAME, _C_NAME),
    57: BadInput("names that a shell expands", _NAME, _C_NAME),
    58: BadInput("names with escapes", _NAME, _C_NAME),
    59: BadInput("kernels whose name is a path or a template",
                 "runtime/manifest::hostile_kernel_names_are_refused",
                 "runtime/c/load::hostile_kernel_names_have_the_same_verdict"),
}  # fmt: skip

CUBINS = {
    60: BadInput("no ELF file", _CUBIN, _C_CUBIN),
    61: BadInput("32 bits, or the other byte order", _CUBIN, _C_CUBIN),
    62: BadInput("a shared object as cubin", "runtime/cubin::a_shared_object_is_no_cubin_and_the_reverse",
                 "runtime/c/artifacts::a_shared_object_is_no_cubin_and_the_reverse"),
    63: BadInput("PTX as cubin", _CUBIN, _C_CUBIN),
    64: BadInput("a fat binary as cubin", _CUBIN, _C_CUBIN),
    65: BadInput("a cubin that is not linked", _CUBIN, _C_CUBIN),
    66: BadInput("another architecture",
                 "runtime/proof::another_target_is_told runtime/cuda::exact_architecture",
                 "runtime/c/artifacts::unknown_architectures_are_told "
                 "runtime/c/cuda_calls::device_decides_the_target"),
    67: BadInput("another suffix of the same architecture", f"runtime/proof::another_target_is_told {_CUBIN}",
                 f"runtime/c/artifacts::cubins_of_both_layouts_are_read {_C_CUBIN}"),
    68: BadInput("a layout that is not known", _CUBIN, _C_CUBIN),
    69: BadInput("ELF version 0", _CUBIN, _C_CUBIN),
    70: BadInput("section tables out of the file or of no size", _CUBIN, _C_CUBIN),
    71: BadInput("sections over each other, or beyond any file", _CUBIN, _C_CUBIN),
    72: BadInput("names without an end", _CUBIN, _C_CUBIN),
    73: BadInput("a register count of no symbol", _CUBIN, _C_CUBIN),
    74: BadInput("records longer than their section, or of no form", _CUBIN, _C_CUBIN),
    75: BadInput("no kernel, two kernels, another name",
                 "runtime/bad_input::a_cubin_without_a_kernel "
                 "runtime/proof::two_kernels_in_one_file_are_told "
                 f"{_FALSE}",
                 "runtime/c/bad_input::a_cubin_without_a_kernel "
                 f"runtime/c/artifacts::clusters_and_second_kernels_are_told {_C_FALSE}"),
    76: BadInput("parameters with gaps, over each other, twice, too few", f"{_CUBIN} {_FALSE}",
                 f"{_C_CUBIN} {_C_FALSE}"),
    77: BadInput("another block than the file's",
                 f"{_FALSE} runtime/proof::a_file_that_fixes_no_block_is_told",
                 _C_FALSE),
    78: BadInput("more shared memory than a device has",
                 f"{_FALSE} runtime/cuda::too_much_shared_memory_is_passed_over",
                 f"{_C_FALSE} runtime/c/cuda_calls::launch_attributes"),
    79: BadInput("a stack or spills that were not promised", _FALSE, _C_FALSE),
    80: BadInput("the second form of parameter records",
                 "runtime/cubin::parameters_over_4_kib_use_the_second_record_form",
                 "runtime/c/bad_input::parameters_over_4_kib"),
}  # fmt: skip

CALLS = {
    81: BadInput("too many or too few arguments", _MISUSE, _C_MISUSE),
    82: BadInput("arguments of other types", _MISUSE,
                 f"{_C_MISUSE} runtime/c/calls::what_only_c_can_be_given"),
    83: BadInput("integers beyond their type", f"runtime/call::integer_scalar_binds_a_dim {_CUDA}",
                 "runtime/c/calls::integer_scalar_binds_a_dim"),
    84: BadInput("a null address", _CUDA, f"{_C_CUDA} runtime/c/calls::what_only_c_can_be_given"),
    85: BadInput("an address that is not aligned",
                 "runtime/cuda::alignment_chooses_the_variant "
                 "runtime/strange_manifests::both_sides_of_an_in_place_operand_are_aligned",
                 f"{_C_CUDA} runtime/c/strange_manifests::both_sides_of_an_in_place_operand_are_aligned"),
    86: BadInput("an integer that does not divide as promised", "runtime/call::parameter_promises",
                 "runtime/c/calls::parameter_promises"),
    87: BadInput("arrays of other layouts, types, orders, ranks; read-only, empty",
                 f"{_MISUSE} runtime/call::zero_rows_run_nothing",
                 f"{_C_MISUSE} runtime/c/calls::zero_rows_run_nothing"),
    88: BadInput("memory of the CPU for a GPU, and the reverse",
                 f"{_CUDA} runtime/cuda::tensor_of_another_device",
                 f"{_C_CUDA} runtime/c/calls::what_only_c_can_be_given"),
    89: BadInput("memory of another GPU", "runtime/cuda::tensor_of_another_device",
                 "runtime/c/bad_input::memory_of_another_device"),
    90: BadInput("grids of nothing, below it, beyond the limits",
                 f"runtime/cuda::grid_axis_limits {_CUDA} "
                 "runtime/strange_manifests::no_expression_leaves_as_anything_else",
                 "runtime/c/cuda_calls::grids_are_checked_before_the_driver_sees_them "
                 "runtime/c/cuda_calls::an_empty_grid_launches_nothing"),
    91: BadInput("a stream of another context",
                 "runtime/contexts::a_stream_or_function_of_another_context_is_named", _GONE),
    92: BadInput("a load during a capture", "runtime/seal::a_load_during_capture_is_refused_by_name",
                 "runtime/c/cuda_calls::loading_during_capture_is_refused"),
    93: BadInput("a call after a fork",
                 "runtime/cuda::after_fork runtime/contexts::a_forked_child_is_told_whatever_it_calls",
                 "runtime/c/library::after_fork"),
    94: BadInput("a call after closing", "runtime/load::close",
                 "runtime/c/library::calls_outlive_their_library"),
    95: BadInput("a context that was reset", "runtime/contexts::a_lost_context_is_typed_and_close_is_quiet",
                 _GONE),
    96: BadInput("32 threads that load at once", "runtime/load::32_threads_load_once",
                 "runtime/c/load::32_threads_load_once"),
    97: BadInput("an output over an input", "runtime/call::aliasing runtime/call::aliasing_through_a_plan",
                 "runtime/c/calls::aliasing runtime/c/calls::aliasing_through_a_plan"),
    98: BadInput("extents whose product no integer holds",
                 f"runtime/bad_input::extents_whose_product_is_beyond_64_bits {_CUDA} "
                 "runtime/strange_manifests::sizes_of_outputs",
                 "runtime/c/calls::what_only_c_can_be_given runtime/c/strange_manifests::sizes_of_outputs"),
}  # fmt: skip

COMMANDS = {
    99: BadInput("no or unknown words",
                 "tools/cli::no_command_prints_help_and_fails "
                 "tools/cli::a_wrong_command_line_is_told_what_was_meant "
                 "compiler/pipeline::selections_of_nothing_are_refused", COMMAND),
    100: BadInput("an output among the sources",
                  "compiler/tree::output_folders_that_are_not_ours_are_refused "
                  "compiler/pipeline::the_sources_are_no_output_folder", BUILDER),
    101: BadInput("an output that is someone else's",
                  "compiler/tree::output_folders_that_are_not_ours_are_refused",
                  BUILDER),
    102: BadInput("a closed or full standard output",
                  "tools/cli::a_closed_pipe_is_silent tools/cli::a_full_disk_is_told", COMMAND),
    103: BadInput("an interrupt",
                  "tools/cli::a_real_interrupt "
                  "compiler/pipeline::an_interrupted_build_leaves_the_tree_and_no_worker",
                  COMMAND),
    104: BadInput("a termination", "compiler/pipeline::an_interrupted_build_leaves_the_tree_and_no_worker",
                  COMMAND),
    105: BadInput("odd locales, arguments and terminals",
                  "tools/bad_arguments::odd_paths_are_told_in_any_locale tools/cli::odd_terminal_widths "
                  "tools/cli::text_survives_an_ascii_terminal", COMMAND),
    # One that hangs is not timed out: an interrupt ends the build, and leaves the tree as it was.
    106: BadInput("an assembler that is missing, another, hanging or crashing",
                  "backends/cuda/assembler::an_assembler_that_is_none "
                  "backends/cuda/assembler::an_assembler_that_is_missing "
                  "backends/cuda/assembler::another_assembler_in_the_environment_is_not_used "
                  "compiler/pipeline::a_job_that_takes_its_process_down_fails_alone "
                  "compiler/pipeline::an_interrupted_build_leaves_the_tree_and_no_worker", BUILDER),
    107: BadInput("no compiler for a command that needs none",
                  "tools/list::runtime_alone_is_enough "
                  "runtime/verify::no_compiler_no_assertion_and_no_write_is_needed "
                  "tools/cli::no_error_is_a_traceback", COMMAND),
    108: BadInput("no system compiler", "backends/cpu/compile::the_compiler_sees_a_private_environment",
                  BUILDER),
    109: BadInput("no home",
                  "tools/bad_arguments::no_home runtime/load::read_only_system_without_home",
                  "runtime/c/load::read_only_system_without_home"),
    110: BadInput("a clock that is wrong", "runtime/bad_inputs::no_clock_decides_anything",
                  "runtime/bad_inputs::no_clock_decides_anything"),
    111: BadInput("Python without assertions",
                  "runtime/load::read_only_system_without_home "
                  "runtime/verify::no_compiler_no_assertion_and_no_write_is_needed",
                  "libkiln has no assertions"),
    112: BadInput("limits of memory and file size",
                  "runtime/signature::limits_of_memory_and_file_size runtime/faults::every_allocation "
                  "compiler/tree::a_file_size_limit_leaves_the_old_tree",
                  "runtime/c/faults::every_allocation_may_fail "
                  "runtime/c/run_faults::every_request_on_the_cpu"),
}  # fmt: skip

REASONS = frozenset({BUILDER, COMMAND, "libkiln has no assertions"})
TABLE: dict[int, BadInput] = {**TREES, **TEXTS, **NAMES, **CUBINS, **CALLS, **COMMANDS}
