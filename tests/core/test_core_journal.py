"""A journal keeps what was written whole, whatever ends the process, and never more than it may."""

from pathlib import Path

from headway.core.journal import Event, Finished, JournalFile, Looked, Opened, Seen, read_journal

EVENTS: list[Event] = [
    Seen(0, 3, True, "v3"),
    Looked(7),
    Opened("1f", "env", 12, 3),
    Finished(250, "1f.0.0"),
    Finished(1, "1f.1.0", "timeout"),
]


def write(path: Path, events: list[Event], max_bytes: int = 1 << 20) -> JournalFile:
    file = JournalFile(path, max_bytes)
    for event in events:
        file.add(event)
        file.flush()
    return file


def test_events_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "journal.bin"
    write(path, EVENTS).close()
    journal = read_journal(path)
    assert journal.events == EVENTS and not journal.torn and journal.size == path.stat().st_size
    assert read_journal(tmp_path / "none.bin").events == []


def test_a_torn_end_is_not_read_and_cut_before_more_is_written(tmp_path: Path) -> None:
    path = tmp_path / "journal.bin"
    write(path, EVENTS).close()
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        journal = read_journal(path)
        assert journal.events == EVENTS[: len(journal.events)] and journal.torn == (journal.size < size)
        write(path, [Looked(1)]).close()
        assert read_journal(path).events == [*journal.events, Looked(1)]


def test_a_flipped_bit_ends_the_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal.bin"
    write(path, EVENTS).close()
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)
    journal = read_journal(path)
    assert journal.events == EVENTS[:-1] and journal.torn


def test_events_that_are_not_flushed_are_written_when_it_is_closed(tmp_path: Path) -> None:
    file = JournalFile(tmp_path / "journal.bin", 1 << 20)
    file.add(Looked(1))
    assert read_journal(tmp_path / "journal.bin").events == []
    file.close()
    assert read_journal(tmp_path / "journal.bin").events == [Looked(1)]


def test_a_full_journal_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "journal.bin"
    file = write(path, EVENTS * 40, max_bytes=400)
    assert file.full and path.stat().st_size <= 400
    file.close()
    kept = read_journal(path)
    assert not kept.torn and kept.events == (EVENTS * 40)[: len(kept.events)]
    again = write(path, EVENTS, max_bytes=kept.size)
    assert again.full and read_journal(path).events == kept.events
