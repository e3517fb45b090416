"""What popups say: one sentence for one crash, numbers for many, and never a promise that is not kept."""

from unstuck.desktop.tallies import MAX_MESSAGE_CHARS, AbsenceTally, CrashTally, DeathTally, UnservedTally


def test_one_crash_is_told_in_the_words_of_the_design() -> None:
    tally = CrashTally()
    tally.add("resize", "Worker processing your job has crashed. Job will be retried.")
    assert tally.text() == (
        "A worker processing job 'resize' has crashed.\n\n"
        "Worker processing your job has crashed. Job will be retried.\n\n"
        "The job will be automatically retried."
    )


def test_nobody_is_promised_a_retry_that_will_not_be() -> None:
    tally = CrashTally()
    tally.add("resize", "It crashed too often.", final=True)
    assert tally.text().endswith("The job will not be retried.")
    tally.add("resize", "It crashed too often.", final=True)
    assert tally.text().endswith("The jobs will not be retried.")
    tally.add("mail", "Job will be retried.")
    assert tally.text().endswith("2 of them will not be retried, the others automatically.")


def test_many_crashes_are_counted_and_only_a_few_named() -> None:
    tally = CrashTally()
    for number in range(3_000):
        tally.add(f"service-{number % 8}", "died", count=2)
    text = tally.text()
    assert "crashed 6,000 times" in text
    assert "'service-0' (750)" in text
    assert "and 3 more." in text
    assert text.endswith("The jobs will be automatically retried.")
    tally.clear()
    tally.add("mail", "died")
    assert "A worker processing job 'mail'" in tally.text()


def test_a_message_without_end_does_not_fill_the_screen() -> None:
    tally = AbsenceTally()
    tally.add("x" * 5_000, "y" * 100_000)
    assert len(tally.text()) < MAX_MESSAGE_CHARS + 300


def test_nobody_there_asks_to_start_workers() -> None:
    tally = AbsenceTally()
    tally.add("PluginX", "No workers are currently available to process this job.")
    assert tally.text() == (
        "No workers are available to process job 'PluginX'.\n\n"
        "No workers are currently available to process this job.\n\n"
        "Please start worker servers and try again."
    )
    tally.add("PluginX", "No workers are currently available to process this job.")
    assert tally.text().startswith("No workers are available to process 2 jobs: 'PluginX' (2).")


def test_a_death_says_what_became_of_the_jobs_of_the_dead_alone() -> None:
    tally = DeathTally()
    assert not tally.settle("w1", "requeued")
    tally.add("w1", "Dead worker detected: w1")
    assert "each job's own rule" in tally.text()
    assert tally.settle("w1", "requeued")
    assert tally.settle("w1", "failed")
    assert tally.settle("w1", "requeued")
    assert not tally.settle("w1", "worker_started")
    assert not tally.settle("w2", "requeued")
    assert not tally.settle(None, "requeued")
    assert tally.text() == (
        "Worker w1 has died.\n\nDead worker detected: w1\n\nWhat became of its jobs: 2 queued again, 1 failed."
    )
    for number in range(2, 12):
        tally.add(f"w{number}", "Dead worker detected")
    assert tally.text().startswith("11 workers have died: w1, w2, w3, w4, w5 and 6 more.")


def test_a_queue_that_nobody_serves_is_named_once() -> None:
    tally = UnservedTally()
    for number in range(20):
        tally.add(f"Nobody serves queue {number % 7}.")
    text = tally.text()
    assert text.count("Nobody serves queue 0.") == 1
    assert "And 2 more." in text
    assert "start worker servers" in text
