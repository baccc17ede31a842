from __future__ import annotations

from pathlib import Path

from implicit_llm_data.babi.stories import (
    Line,
    file_name,
    find_files,
    format_stories,
    parse_stories,
    vocabulary_of,
    words_of,
)

TEXT = (
    "1 Ann and Bob went up.\n"
    "2 Where is Ann? \tup\t1\n"
    "3 The Box of Nails fell.\n"
    "4 What does Bob hold?\tNail,Hammer\t1 3\n"
    "1 Bob slept.\n"
    "2 Who slept?\tbob\t\n"
)


def test_stories_begin_at_lines_numbered_one() -> None:
    assert parse_stories(TEXT.encode()) == [
        [
            Line(1, "Ann and Bob went up."),
            Line(2, "Where is Ann?", "up", (1,)),
            Line(3, "The Box of Nails fell."),
            Line(4, "What does Bob hold?", "Nail,Hammer", (1, 3)),
        ],
        [Line(1, "Bob slept."), Line(2, "Who slept?", "bob", ())],
    ]


def test_what_is_written_is_read_back() -> None:
    stories = parse_stories(TEXT.encode())
    assert parse_stories(format_stories(stories).encode()) == stories


def test_a_missing_line_end_and_windows_line_ends_do_no_harm() -> None:
    stories = parse_stories(TEXT.encode())
    assert parse_stories(TEXT.removesuffix("\n").encode()) == stories
    assert parse_stories(TEXT.replace("\n", "\r\n").encode()) == stories


def test_words_are_lower_case_with_the_mark_apart_and_the_answer_as_one_word() -> None:
    story = parse_stories(TEXT.encode())[0]
    assert " ".join(words_of(story)) == (
        "ann and bob went up . where is ann ? up the box of nails fell . what does bob hold ? nail,hammer"
    )


def test_the_vocabulary_does_not_depend_on_the_order_of_the_words() -> None:
    assert vocabulary_of(["b", "?", "a", "b", "."]) == ["<pad>", "<eos>", ".", "?", "a", "b"]


def test_files_of_a_split_come_by_task_number(tmp_path: Path) -> None:
    names = [file_name(task, split) for task in (10, 2, 1) for split in ("train", "test")]
    for name in [*names, "qa3_train.txt.bak", "xqa4_train.txt"]:
        (tmp_path / name).touch()
    assert list(find_files(tmp_path, "train").items()) == [
        (task, tmp_path / f"qa{task}_train.txt") for task in (1, 2, 10)
    ]
