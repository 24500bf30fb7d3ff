"""Every fault of the field that must have a test before a release, and the tests that fail on it.

The numbers are those of FIELD-CASES.md, whose cases are restated public reports: A of batch jobs and storage, B of speculative decoding.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

P0 = {
    *(f"A{n}" for n in (1, 2, 4, 5, 6, 8, 10, 11, 14, 15, 17, 18, 19, 22, 26, 29, 30, 32, 33, 34, 36, 38, 40, 45, 46)),
    *(f"B{n}" for n in (*range(1, 9), *range(10, 17), *range(18, 22), *range(27, 37), 42, 43, 45)),
}

#: case -> its tests
CASES = {
    # a prompt that is too long ends its own row
    "A1": (
        "engine/test_long_rows.py::test_a_prompt_that_is_too_long_is_counted_and_costs_no_pass",
        "engine/test_engine_api.py::test_bad_rows_come_back_typed_and_alone",
        "pipeline/test_run.py::test_every_kind_of_row_in_one_job",
    ),
    # so does any other bad input
    "A2": (
        "engine/test_engine_api.py::test_bad_rows_come_back_typed_and_alone",
        "engine/test_prompting.py::test_bad_requests",
        "engine/test_prompting.py::test_templates_that_fail",
        "pipeline/test_records.py::test_what_is_wrong_with_a_record_is_said_with_its_place",
    ),
    # an engine or a node that is lost
    "A4": (
        "chaos/test_runs.py::test_a_node_of_a_cluster_is_lost",
        "pipeline/test_run.py::test_rows_that_kill_their_engine_become_error_rows",
    ),
    # a device without memory: told with what to lower, tried again, never a hang
    "A5": (
        "engine/test_memory.py::test_no_room_for_the_models",
        "engine/test_memory.py::test_no_room_for_the_caches",
        "engine/test_engine_api.py::test_running_out_of_memory_is_the_engines_error",
        "workers/test_engine_thread.py::test_an_engine_failure_reaches_every_caller",
        "pipeline/test_run.py::test_an_engine_that_cannot_be_loaded_ends_the_job",
        "pipeline/test_run.py::test_rows_that_kill_their_engine_become_error_rows",
    ),
    # ids: given, generated, repeated
    "A8": (
        "pipeline/test_records.py::test_ids",
        "pipeline/test_sources.py::test_chunks_number_the_rows_as_one_pass_does",
        "pipeline/test_sources.py::test_inputs_that_are_refused_up_front",
        "pipeline/test_sources.py::test_the_first_repeated_ids_of_a_big_input_are_shown",
    ),
    # one commit point
    "A6": (
        "pipeline/test_local_folder.py::test_a_file_that_cannot_be_finished_is_not_there",
        "pipeline/test_part_writer.py::test_a_put_of_a_killed_run_that_lands_late_adds_no_row_twice",
        "pipeline/test_resume.py::test_a_hole_in_the_middle_is_filled_even_of_a_job_that_says_it_is_finished",
    ),
    # resuming, in the middle of a file too
    "A10": ("pipeline/test_resume.py::test_only_the_missing_rows_are_made",),
    "A11": (
        "pipeline/test_resume.py::test_only_the_missing_rows_are_made",
        "pipeline/test_commit.py::test_a_row_waits_no_longer_than_asked",
    ),
    # another job into the same folder
    "A14": (
        "pipeline/test_run.py::test_the_same_job_again_does_nothing_and_another_is_refused",
        "pipeline/test_resume.py::test_what_can_change_rows_is_refused",
        "pipeline/test_resume.py::test_a_changed_line_is_refused_and_named",
    ),
    # one schema, whatever the rows hold
    "A15": (
        "pipeline/test_run.py::test_every_kind_of_row_in_one_job",
        "pipeline/test_run.py::test_a_job_of_errors_only_has_the_same_schema",
    ),
    # rows with different keys, and with parameters of their own
    "A17": (
        "pipeline/test_run.py::test_every_kind_of_row_in_one_job",
        "engine/test_sampling_params.py::test_rows_of_one_batch_keep_their_own_parameters",
    ),
    "A18": (
        "pipeline/test_messy.py::test_a_file_gives_good_rows_and_typed_error_rows",
        "pipeline/test_sources.py::test_parquet_rows",
        "engine/test_sampling_params.py::test_mapping_is_checked_and_laid_over_the_defaults",
    ),
    # n samples are n rows
    "A19": (
        "pipeline/test_run.py::test_every_kind_of_row_in_one_job",
        "pipeline/test_records.py::test_samples_are_adjacent_and_a_row_may_ask_for_its_own_number",
        "engine/test_engine_api.py::test_samples_of_a_row_differ",
    ),
    # a long row holds up its own slot
    "A22": (
        "engine/test_engine_api.py::test_free_slots_are_refilled_at_once",
        "workers/test_engine_thread.py::test_slots_refill_while_a_long_row_runs",
        "pipeline/test_run.py::test_a_long_row_holds_up_only_its_neighbours",
    ),
    # the hub is asked once
    "A26": (
        "engine/models/test_hub.py::test_one_resolution_serves_all_workers",
        "engine/models/test_hub.py::test_no_network",
    ),
    # a signal keeps what is finished
    "A29": ("pipeline/test_cli.py::test_a_signal_keeps_the_finished_rows",),
    # an object store that cannot be used is told before a model is loaded
    "A32": (
        "pipeline/test_s3_input.py::test_wrong_credentials",
        "pipeline/test_s3_input.py::test_without_credentials",
        "pipeline/test_s3_input.py::test_no_permission",
        "pipeline/test_s3_input.py::test_what_is_not_there_is_named",
        "pipeline/test_s3_input.py::test_an_endpoint_that_cannot_be_reached_is_named_within_seconds",
        "pipeline/test_s3_folder.py::test_a_bucket_that_is_not_there_is_refused",
    ),
    # a write that is repeated, or that comes late
    "A34": (
        "pipeline/test_part_writer.py::test_a_put_of_a_killed_run_that_lands_late_adds_no_row_twice",
        "pipeline/test_part_writer.py::test_two_runs_at_once_add_no_row_twice",
        "pipeline/test_part_writer.py::test_rows_that_come_twice_are_written_once",
    ),
    # bounded memory on both sides, and results during the run
    "A36": (
        "pipeline/test_sources.py::test_a_scan_of_many_records_takes_little_memory",
        "pipeline/test_sources.py::test_tables_are_small_whatever_the_records_hold",
        "engine/test_engine_api.py::test_stream_takes_requests_as_it_needs_them",
        "pipeline/test_run.py::test_a_long_row_holds_up_only_its_neighbours",
    ),
    # a broken line; a second run over the rows of the first
    "A38": (
        "pipeline/test_sources.py::test_bad_lines_become_error_rows_with_their_place",
        "pipeline/test_messy.py::test_all_of_them_in_one_job",
        "pipeline/test_run.py::test_overwrite_keeps_the_earlier_rows_until_there_are_new_ones",
    ),
    # one BOS
    "A40": (
        "engine/test_prompting.py::test_one_bos_where_the_template_writes_it",
        "engine/test_encoding.py::test_bos_of_raw_text",
        "engine/test_encoding.py::test_templated_text_gets_no_bos",
        "engine/models/test_targets.py::test_vicunas_template",
        "engine/models/test_preset.py::test_preset_chat_template_has_one_bos",
    ),
    # all that can change rows is compared, models and code too
    "A45": (
        "pipeline/test_fingerprint.py::test_every_option_is_in_the_fingerprint_or_free",
        "pipeline/test_fingerprint.py::test_models_are_their_content",
        "engine/models/test_content.py::test_all_that_the_engine_opens_matters_and_nothing_else",
        "pipeline/test_commit.py::test_a_failure_of_the_disk_reaches_whoever_adds_and_whoever_closes",
    ),
    # rows are durable early, truncation is no failure, and other parameters are another job
    "A46": (
        "pipeline/test_cli.py::test_a_signal_keeps_the_finished_rows",
        "pipeline/test_commit.py::test_a_row_waits_no_longer_than_asked",
        "pipeline/test_local_folder.py::test_a_file_that_cannot_be_finished_is_not_there",
        "pipeline/test_run.py::test_every_kind_of_row_in_one_job",
        "pipeline/test_run.py::test_the_same_job_again_does_nothing_and_another_is_refused",
    ),
    # drawn from one q, verified against another
    "B1": (
        "engine/law/test_mutants.py::test_public_bug_by_its_numbers",
        "engine/law/test_published_examples.py::test_coins_and_residuals",
        "engine/law/test_enumeration.py::test_truncated_draft",
    ),
    "B2": (
        "engine/law/test_mutants.py::test_public_bug_by_its_numbers",
        "engine/law/test_published_examples.py::test_coins_and_residuals",
    ),
    "B3": ("engine/law/test_mutants.py::test_public_bug_by_its_numbers", "engine/law/test_enumeration.py::test_every_method"),
    "B4": (
        "engine/law/test_published_examples.py::test_logits_of_half_precision",
        "engine/law/test_probabilities.py::test_single_precision_agrees_with_double",
    ),
    # each row at its own temperature
    "B5": (
        "engine/law/test_enumeration.py::test_every_method",
        "engine/law/test_trees.py::test_against_plain_reading",
        "engine/law/test_static.py::test_temperatures_share_a_batch",
        "engine/test_sampling_params.py::test_rows_of_one_batch_keep_their_own_parameters",
        "engine/test_statistics.py::test_the_engines_law_is_the_targets",
    ),
    # what is drawn, what is not, and why both are lossless
    "B6": (
        "engine/law/test_enumeration.py::test_every_method",
        "engine/law/test_enumeration.py::test_four_slots",
        "test_promises.py::test_each_method_says_how_its_tokens_are_accepted",
    ),
    # what a drawn token gains over one-hot ones, by temperature, and how sure that is
    "B7": ("engine/law/test_theory.py::test_closed_forms", "jobs/test_intervals.py::test_gains_are_paired"),
    "B8": ("engine/law/test_published_examples.py::test_neither_a_drawn_token_nor_the_top_one_is_always_better",),
    # ends in the middle of an accepted path
    "B10": ("engine/test_stopping.py::test_eos_at_each_depth", "engine/test_stopping.py::test_cut"),
    "B11": (
        "engine/test_stopping.py::test_stop_strings",
        "engine/test_stopping.py::test_no_chunking_moves_a_stop_string",
        "engine/test_logprobs.py::test_logprobs_end_where_the_tokens_do",
    ),
    "B12": ("engine/test_stopping.py::test_cut", "engine/test_statistics_of_cycles.py::test_invariants"),
    # raw counts of each row and cycle
    "B13": ("pipeline/test_tau.py::test_three_definitions_from_the_rows",),
    "B14": ("pipeline/test_tau.py::test_three_definitions_from_the_rows", "pipeline/test_run.py::test_every_kind_of_row_in_one_job"),
    # batches of rows of different lengths
    "B15": (
        "engine/test_greedy_equals_transformers.py::test_every_method_on_ragged_prompts",
        "engine/test_coupled_equality.py::test_order_and_neighbours_do_not_matter",
    ),
    "B16": (
        "engine/test_ragged_accepts.py::test_three_zero_keys",
        "engine/test_ragged_accepts.py::test_accepts_of_0_3_and_7",
        "engine/test_attention.py::test_zeroed_places_take_no_share",
    ),
    # the draft knows the target's own features
    "B18": (
        "engine/test_draft_cache.py::test_draft_logits_equal_those_of_a_fresh_prefill",
        "engine/test_draft_cache.py::test_draft_logits_equal_the_dense_reading",
        "engine/test_drafts.py::test_after_any_cycle_the_draft_knows_the_text_and_nothing_else",
    ),
    # checkpoints: a map that is missing, sizes that do not fit, names that are not known
    "B19": (
        "engine/models/test_layouts.py::test_a_renamed_map_is_an_unknown_tensor",
        "engine/models/test_layouts.py::test_missing_map_is_refused_when_the_sizes_differ",
        "engine/models/test_checkpoint.py::test_d2t_missing",
        "engine/models/test_preset.py::test_preset_answers_and_its_draft_agrees",
    ),
    "B20": (
        "engine/models/test_checkpoint.py::test_loads_with_target_ids_and_feature_layers",
        "engine/models/test_checkpoint.py::test_misshapen_tensor",
        "engine/models/test_layouts.py::test_official_heads_by_their_configuration",
    ),
    "B21": (
        "engine/models/test_checkpoint.py::test_missing_tensor",
        "engine/models/test_checkpoint.py::test_unknown_tensor",
        "engine/models/test_loading.py::test_unknown_tensor",
    ),
    # past what the draft was trained on
    "B27": (
        "engine/test_long_rows.py::test_past_its_trained_length_a_head_harms_nothing",
        "engine/test_long_document.py::test_greedy_text_is_transformers",
        "pipeline/test_report.py::test_rows_past_the_drafts_trained_length_are_told",
    ),
    "B28": (
        "engine/test_long_rows.py::test_past_its_trained_length_a_head_harms_nothing",
        "engine/test_drafts.py::test_past_its_trained_length_a_draft_harms_nothing",
    ),
    # memory: the draft's cache counts, and logits are made where they are read
    "B30": (
        "engine/test_memory.py::test_the_output_head_runs_where_a_token_is_drawn_only",
        "engine/test_memory.py::test_the_drafts_cache_counts",
        "engine/test_engine_api.py::test_a_row_that_can_never_fit",
    ),
    "B31": (
        "engine/test_attention.py::test_random_trees_and_prompts",
        "engine/test_attention.py::test_levels_behind_earlier_ones",
    ),
    # randomness: of the row alone, each key once
    "B32": (
        "engine/test_coupled_equality.py::test_order_and_neighbours_do_not_matter",
        "engine/law/test_draws.py::test_same_coordinates_same_draw_in_any_batch",
        "pipeline/test_run.py::test_rows_do_not_depend_on_batch_workers_or_chunks",
    ),
    "B33": (
        "engine/law/test_mutants.py::test_mutant_is_seen",
        "engine/law/test_draws.py::test_keys_do_not_collide",
        "engine/law/test_draws.py::test_neighbouring_coordinates_are_independent",
        "engine/test_key_audit.py::test_each_key_is_consumed_once",
    ),
    "B34": (
        "engine/law/test_published_examples.py::test_a_residual_without_mass_is_the_law_itself",
        "engine/law/test_published_examples.py::test_a_draft_that_is_the_target",
        "engine/test_engine_api.py::test_an_engine_can_be_used_again",
        "engine/test_sampling_params.py::test_greedy_text_equals_a_plain_loop",
        "engine/test_sampling_params.py::test_penalty_counts_the_tokens_of_the_path",
    ),
    # greedy is greedy
    "B35": (
        "engine/law/test_trees.py::test_greedy_text",
        "engine/test_greedy_equals_transformers.py::test_every_method_on_ragged_prompts",
    ),
    "B36": (
        "engine/test_greedy_equals_transformers.py::test_every_method_on_ragged_prompts",
        "engine/test_coupled_equality.py::test_reproducible_is_equal_to_the_bit",
        "test_promises.py::test_the_text_is_promised_for_the_methods_that_share_noise_only",
    ),
    # the target's law is whole
    "B42": (
        "engine/law/test_published_examples.py::test_the_target_keeps_tokens_that_the_draft_dropped",
        "engine/test_swap.py::test_each_node_emits_the_targets_law",
    ),
    "B43": (
        "engine/test_statistics.py::test_the_engines_law_is_the_targets",
        "engine/test_statistics.py::test_a_mutant_fails",
        "engine/law/test_mutants.py::test_mutant_is_seen",
    ),
    # ties
    "B45": (
        "engine/law/test_worked_example.py::test_survival_does_not_depend_on_the_token",
        "engine/law/test_worked_example.py::test_two_levels_are_lossless",
        "engine/law/test_trees.py::test_ranking_breaks_ties_at_its_end_by_id",
        "engine/test_gpu.py::test_a_gpu_writes_the_cpus_text",
    ),
}

#: case -> what is not built yet
LATER = {
    "A30": "object stores: throttling",
    "A33": "object stores: credentials that expire",
    "B29": "speed: trees sized by measured costs",
}


@functools.cache
def names_of_tests(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_case_is_here_once():
    assert set(CASES) | set(LATER) == P0
    assert not set(CASES) & set(LATER)


@pytest.mark.parametrize("case", CASES)
def test_tests_exist(case):
    assert CASES[case]
    for test in CASES[case]:
        file, _, name = test.partition("::")
        assert name in names_of_tests(TESTS / file), test
