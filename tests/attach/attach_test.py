"""`forkpoint attach` on jobs that run: the same steps on all ranks, or by name which were not; and the jobs go on."""
import json
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import time
import unittest

from job import (FORKPOINT, MINIGPT, PROBE, TRAINER, Place, descriptors_of, resident_kib, settled, threads_of)


class Test(unittest.TestCase):
    def setUp(self):
        self.place = Place()
        self.addCleanup(self.place.close)

    def check_window(self, run, ranks, first, last):
        """Exactly these steps, whole, on exactly these ranks."""
        expected = {r: (first, last, last - first + 1, "whole") for r in ranks}
        self.assertEqual(self.place.steps_of(run), expected)

    def check_asleep(self, jobs):
        for job in jobs:
            self.assertIsNone(job.poll(), "the job goes on")
        self.place.await_(self.place.ps, lambda found: all(j["state"] == "dormant" for j in found), "all ranks asleep")

    def digests_of(self, run):
        """{(rank, step): digest} without what was loaded before the first step"""
        shown = json.loads(self.place.run("show", run, "--summary", "--json").stdout)
        return {(s["rank"], s["step"]): s["digest"] for s in shown["steps"] if s["step"] is not None and s["step"] >= 0}

    def window_of(self, done):
        said = re.search(r"recording steps (\d+) to (\d+) of (\d+) ranks?", done.stderr)
        self.assertTrue(said, done.stderr)
        return int(said[1]), int(said[2])


class Windows(Test):
    def test_ps_lists_the_ranks_of_a_job_with_their_steps(self):
        job = self.place.start_minigpt()
        before = self.place.ps()
        self.assertEqual([j["rank"] for j in sorted(before, key=lambda j: j["rank"])], [0, 1, 2, 3])
        for rank in before:
            self.assertEqual((rank["world_size"], rank["state"], rank["run"]), (4, "dormant", None))
            self.assertEqual(rank["command"], [a.decode() for a in pathlib.Path(f"/proc/{rank['pid']}/cmdline").read_bytes().split(b"\0")[:-1]])
            self.assertNotEqual(rank["pid"], job.pid, "the launcher trains nothing")
        self.place.await_(self.place.ps, lambda now: all(a["step"] > b["step"] for a, b in zip(now, before)), "steps that count")

    def test_exactly_the_steps_asked_for_are_recorded_on_all_ranks_and_they_are_those_that_record_sees(self):
        job = self.place.start_minigpt(4, 10_000_000)
        done = self.place.attach("--steps", 3, "--level", "layer")
        self.assertEqual(done.returncode, 0, done.stderr)
        first, last = self.window_of(done)
        self.assertEqual(last - first, 2)
        self.check_window("run", range(4), first, last)
        self.check_asleep([job])
        self.assertEqual(self.place.manifest("run")["state"], "whole")
        # Another job that is equal, recorded in the usual way.
        command = [MINIGPT, "--ranks", 4, "--steps", last + 3, "--layers", 1, "--dim", 8, "--heads", 1, "--seq", 8, "--batch", 1,
                   "--threads", 1, "--seed", 3]
        job.kill()
        recorded = self.place.run("record", "-o", "recorded", "--level", "layer", "--steps", f"{first}:{last}", "--", *command, timeout=300)
        self.assertEqual(recorded.returncode, 0, recorded.stderr)
        self.assertEqual(self.digests_of("run"), self.digests_of("recorded"))
        self.assertEqual(len(self.digests_of("run")), 4 * 3)
        # The recording holds what the job started from as well, which nobody saw of the attached one: told, and not passed over.
        verdict = json.loads(self.place.run("diff", "recorded", "run", "--json").stdout)
        self.assertEqual((verdict["verdict"], verdict["first"], verdict["gaps"]), ("incomparable", None, []), verdict)
        self.assertIn("the 3 common steps are equal", verdict["reason"])
        self.assertGreater(verdict["records_compared"], 4 * 3 * 20)
        # And the test can tell: another seed is not the same.
        command[-1] = 4
        self.place.run("record", "-o", "other", "--level", "layer", "--steps", f"{first}:{last}", "--", *command, timeout=300)
        self.assertEqual(json.loads(self.place.run("diff", "other", "run", "--json").stdout)["verdict"], "diverged")

    def test_equal_jobs_that_were_attached_at_the_same_steps_are_identical(self):
        for run in ("one", "two"):
            job = self.place.start_minigpt()
            done = self.place.attach("--from", 4000, "--to", 4002, "--level", "layer", run=run, timeout=200)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.check_window(run, range(4), 4000, 4002)
            job.terminate()
            job.wait()
            self.place.await_(self.place.ps, lambda found: not found, "the end of the first job")
        verdict = json.loads(self.place.run("diff", "one", "two", "--json").stdout)
        self.assertEqual((verdict["verdict"], verdict["gaps"]), ("identical", []), verdict)
        self.assertGreater(verdict["records_compared"], 4 * 3 * 20)

    def test_a_window_that_was_named_is_recorded_and_one_that_has_passed_is_refused(self):
        jobs = self.place.start_trainers(2, pause=20)
        step = max(j["step"] for j in self.place.ps())
        done = self.place.attach("--from", step + 60, "--to", step + 64)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.check_window("run", range(2), step + 60, step + 64)
        late = self.place.attach("--steps", f"{step}:{step + 1}", run="late")
        self.assertEqual(late.returncode, 125, late.stderr)
        self.assertIn(f"so recording cannot begin with step {step}", late.stderr)
        self.assertFalse((self.place.path / "late").exists())
        self.check_asleep(jobs)

    def test_a_job_is_found_by_its_name_and_by_its_processes_and_not_mixed_with_another(self):
        first = [self.place.start(TRAINER, 10**7, "--pause", 5, RANK=str(r), WORLD_SIZE="2", FORKPOINT_JOB="one") for r in range(2)]
        self.place.start(TRAINER, 10**7, "--pause", 5, RANK="0", WORLD_SIZE="2", FORKPOINT_JOB="two")
        self.place.await_ranks(3)
        mixed = self.place.attach()
        self.assertEqual(mixed.returncode, 125)
        self.assertIn("both rank 0", mixed.stderr)
        named = self.place.run("attach", "--job", "one", "-o", "named")
        self.assertEqual(named.returncode, 0, named.stderr)
        self.assertEqual(sorted(self.place.steps_of("named")), [0, 1])
        one = self.place.run("attach", first[1].pid, "-o", "one")
        self.assertEqual(one.returncode, 0, one.stderr)
        self.assertEqual(sorted(self.place.steps_of("one")), [1])
        self.assertEqual(self.place.manifest("one")["ranks"], [1])

    def test_detach_ends_a_window_early_at_one_step_on_all_ranks(self):
        jobs = self.place.start_trainers(3)
        attached = self.place.attach_in_background("--steps", 1_000_000)
        self.assertEqual(self.place.run("detach", "--all").returncode, 0)
        _, said = attached.communicate(timeout=60)
        self.assertEqual(attached.returncode, 0, said)
        steps = self.place.steps_of("run")
        self.assertEqual(len(steps), 3)
        self.assertEqual(len(set(steps.values())), 1, steps)
        self.check_asleep(jobs)

    def test_ctrl_c_detaches_and_leaves_a_run_that_can_be_read(self):
        jobs = self.place.start_trainers(3)
        attached = self.place.attach_in_background("--steps", 1_000_000)
        attached.send_signal(signal.SIGINT)
        _, said = attached.communicate(timeout=60)
        self.assertEqual(attached.returncode, 130, said)
        steps = self.place.steps_of("run")
        self.assertEqual(len(set(steps.values())), 1, steps)
        self.assertEqual({s[3] for s in steps.values()}, {"whole"})
        self.check_asleep(jobs)

    def test_detach_of_one_rank_ends_the_window_on_all_of_them(self):
        jobs = self.place.start_trainers(3)
        attached = self.place.attach_in_background("--steps", 1_000_000)
        done = self.place.run("detach", jobs[1].pid)
        self.assertIn("3 ranks recorded", done.stderr)
        _, said = attached.communicate(timeout=60)
        self.assertEqual(attached.returncode, 0, said)
        steps = self.place.steps_of("run")
        self.assertEqual((len(steps), len(set(steps.values()))), (3, 1), steps)
        self.check_asleep(jobs)

    def test_detach_while_the_ranks_are_told_of_a_window_ends_it_on_all_of_them_or_on_none(self):
        jobs = self.place.start_trainers(3)
        ends = {0: 0, 125: 0}
        for i in range(12):
            command = [FORKPOINT, "attach", "--all", "--steps", "1000000", "-o", f"run{i}"]
            attached = subprocess.Popen(command, env=self.place.environment(), cwd=self.place.path,
                                        stderr=subprocess.PIPE, text=True)
            self.place.jobs.append(attached)
            time.sleep(0.01 * i)
            while attached.poll() is None:  # before it has told anybody, there is nothing to end
                said = self.place.run("detach", "--all").stderr
                if "none of these is attached" not in said:
                    break
            _, errors = attached.communicate(timeout=60)
            self.assertIn(attached.returncode, ends, f"{said}{errors}")
            ends[attached.returncode] += 1
            if attached.returncode == 0:
                steps = self.place.steps_of(f"run{i}")
                self.assertEqual((len(steps), len(set(steps.values()))), (3, 1), f"{steps} {said}{errors}")
            else:
                self.assertFalse((self.place.path / f"run{i}").exists(), errors)
        self.assertGreater(ends[0], 0, ends)
        self.check_asleep(jobs)

    def test_one_rank_of_three_is_said_to_be_one_of_three(self):
        jobs = self.place.start_trainers(3)
        done = self.place.run("attach", jobs[1].pid, "--steps", 2, "-o", self.place.path / "alone")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("1 of 3 ranks, 2 steps", done.stderr)
        self.assertIn("1 of 3: rank 1; 2 ranks not asked for", self.place.run("show", self.place.path / "alone").stdout)
        self.check_asleep(jobs)

    def test_a_window_that_lies_ahead_is_called_off_by_detach_and_by_ctrl_c_and_nothing_is_left(self):
        jobs = self.place.start_trainers(2)
        for name, status in ("detached", 125), ("interrupted", 130):
            attached = self.place.attach_in_background("--from", 1_000_000_000, run=name, state="ready")
            begun = time.monotonic()
            if name == "detached":
                done = self.place.run("detach", "--all")
                self.assertIn("2 ranks called off before step 1000000000", done.stderr)
            else:
                attached.send_signal(signal.SIGINT)
            _, said = attached.communicate(timeout=60)
            self.assertLess(time.monotonic() - begun, 5)
            self.assertEqual(attached.returncode, status, said)
            self.assertIn("no rank began step 1000000000", said)
            self.assertIn("was not recorded: it was called off", said)
            self.assertFalse((self.place.path / name).exists())
            self.check_asleep(jobs)
        self.assertEqual(self.place.attach(run="next").returncode, 0)

    def test_a_job_that_ends_before_the_window_or_in_it_is_told_so(self):
        self.place.start_trainers(2, steps=400)
        done = self.place.attach("--from", 1_000_000_000, run="never", timeout=100)
        self.assertEqual(done.returncode, 125, done.stderr)
        self.assertIn("its process ended", done.stderr)
        self.assertFalse((self.place.path / "never").exists())
        self.place.start_trainers(2, steps=400)
        done = self.place.attach("--steps", 1_000_000, run="cut", timeout=100)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertEqual(self.place.manifest("cut")["end_reason"], "the job's processes ended before the window did")

    def test_a_client_that_dies_is_as_good_as_a_detach(self):
        jobs = self.place.start_trainers(2)
        attached = self.place.attach_in_background("--steps", 1_000_000)
        attached.kill()
        attached.communicate()
        self.check_asleep(jobs)
        self.assertEqual(self.place.attach(run="next").returncode, 0)

    def test_a_job_of_four_ranks_is_attached_a_hundred_times_in_a_row_and_nothing_is_left_behind(self):
        job = self.place.start_minigpt(4)
        ranks = [rank["pid"] for rank in self.place.ps()]
        self.assertEqual(len(set(ranks) - {job.pid}), 4)

        def held():
            return [(settled(lambda: descriptors_of(pid)), threads_of(pid)) for pid in ranks]

        for i in range(10):  # what is made once is made now
            self.assertEqual(self.place.attach("--steps", 2, run=f"warm{i}").returncode, 0)
        self.check_asleep([job])
        before, resident = held(), [resident_kib(pid) for pid in ranks]
        for i in range(100):
            done = self.place.attach("--steps", 2, run=f"run{i}")
            self.assertEqual(done.returncode, 0, done.stderr)
            first, last = self.window_of(done)
            self.assertEqual(last - first, 1)
            if i % 10 == 0:
                self.check_window(f"run{i}", range(4), first, last)
        self.check_asleep([job])
        grown = [resident_kib(pid) - kib for pid, kib in zip(ranks, resident)]
        print(f"a hundred times: {before} -> {held()} descriptors and threads, {grown} KiB more")
        self.assertEqual(held(), before)
        self.assertLess(max(grown), 1024, "KiB of memory grown")


class Trouble(Test):
    def test_a_rank_that_is_killed_leaves_a_run_that_names_it_with_the_others_whole(self):
        jobs = self.place.start_trainers(3)
        attached = self.place.attach_in_background("--steps", 300)
        jobs[1].kill()
        _, said = attached.communicate(timeout=60)
        self.assertEqual(attached.returncode, 1, said)
        self.assertIn(f"rank 1 (process {jobs[1].pid}) was not recorded to the end: its process ended", said)
        steps = self.place.steps_of("run")
        self.assertEqual(steps[0], steps[2])
        self.assertEqual(steps[0][2:], (300, "whole"))
        self.assertEqual(steps[1][3], "died")
        self.assertEqual(self.place.manifest("run")["state"], "died")
        self.check_asleep([jobs[0], jobs[2]])

    def test_a_rank_that_is_stopped_in_the_window_leaves_a_run_that_names_it(self):
        jobs = self.place.start_trainers(3, pause=2)
        attached = self.place.attach_in_background("--steps", 1500)
        jobs[2].send_signal(signal.SIGSTOP)
        _, said = attached.communicate(timeout=60)
        self.assertEqual(attached.returncode, 1, said)
        self.assertIn(f"rank 2 (process {jobs[2].pid}) was not recorded to the end: it does not answer (is it stopped?)", said)
        steps = self.place.steps_of("run")
        self.assertEqual([steps[r][2:] for r in (0, 1)], [(1500, "whole")] * 2)
        self.assertNotEqual(self.place.shown("run")["state"], "whole")
        jobs[2].send_signal(signal.SIGCONT)
        self.check_asleep(jobs)
        self.assertEqual(self.place.attach(run="next").returncode, 0, "it can be attached again")

    def test_a_rank_that_is_stopped_before_keeps_all_from_recording_and_is_named(self):
        jobs = self.place.start_trainers(3)
        pids = [j.pid for j in jobs]
        jobs[0].send_signal(signal.SIGSTOP)
        done = self.place.run("attach", *pids, "-o", "run")
        self.assertEqual(done.returncode, 125, done.stderr)
        self.assertIn(f"process {jobs[0].pid} does not answer: is it stopped?", done.stderr)
        self.assertFalse((self.place.path / "run").exists())
        jobs[0].send_signal(signal.SIGCONT)
        self.check_asleep(jobs)

    def test_a_job_of_ranks_that_wait_for_each_other_survives_the_death_of_one_as_it_would_unattached(self):
        job = self.place.start_minigpt(4)
        attached = self.place.attach_in_background("--steps", 1_000_000)
        victim = next(j["pid"] for j in self.place.ps() if j["rank"] == 2)
        os.kill(victim, signal.SIGKILL)
        _, said = attached.communicate(timeout=60)
        self.assertEqual(attached.returncode, 1, said)
        self.assertIn("rank 2", said)
        self.assertEqual(self.place.shown("run")["state"], "died")
        self.assertNotEqual(job.wait(timeout=30), 0)

    def test_two_clients_at_once_do_not_get_into_each_others_way(self):
        self.place.start_trainers(2)
        attached = self.place.attach_in_background("--steps", 1_000_000)
        second = self.place.attach(run="second")
        self.assertEqual(second.returncode, 125)
        self.assertIn("another `forkpoint attach` has it", second.stderr)
        self.place.run("detach", "--all")
        attached.communicate(timeout=60)
        self.assertEqual(attached.returncode, 0)

    def test_what_cannot_be_attached_is_told_in_words(self):
        plain = subprocess.Popen(["sleep", "60"], env=self.place.environment())
        shell = self.place.start("bash", "-c", "read -t 60 < <(sleep 60)")
        self.place.jobs.append(plain)
        self.assertIn("was started without the probe", self.place.run("attach", plain.pid).stderr)
        self.assertIn("does not train so far", self.place.run("attach", shell.pid).stderr)
        self.assertIn("there is no process 4000000", self.place.run("attach", 4000000).stderr)
        self.assertIn("there is no job that can be attached", self.place.attach().stderr)
        self.assertIn("launches cannot be recorded from the middle", self.place.attach("--level", "launch").stderr)
        recorded = self.place.run("record", "-o", "r", "--", "sh", "-c", f"{FORKPOINT} attach $$")
        self.assertIn("is recorded already", recorded.stderr)

    def test_another_user_is_refused_and_root_is_not(self):
        if os.geteuid() != 0:
            self.skipTest("needs root to become somebody else")
        jobs = self.place.start_trainers(1)
        self.place.path.chmod(0o755)
        nobody = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
        refused = subprocess.run([*nobody, FORKPOINT, "attach", str(jobs[0].pid)], capture_output=True, text=True, env=self.place.environment())
        self.assertEqual(refused.returncode, 125, refused.stderr)
        self.assertIn("belongs to user 0: only this user and root may attach it", refused.stderr)
        # Past the program: the socket itself, in a folder that anybody may enter.
        path = next(self.place.sockets.glob("*.sock"))
        self.place.sockets.chmod(0o755)
        path.chmod(0o777)
        speak = ("import socket, sys\ns = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\ns.connect(sys.argv[1])\n"
                 "try:\n  s.send(b'forkpoint 1 status\\n')\n  print('got', s.recv(9999))\nexcept OSError as e: print('closed', e)\n")
        answers = [subprocess.run([*who, "python3", "-c", speak, str(path)], capture_output=True, text=True).stdout for who in (nobody, [])]
        self.assertIn(answers[0].split()[0:2] == ["got", "b''"] or answers[0].startswith("closed"), [True], answers)
        self.assertIn("status", answers[1])
        # And a folder that others may enter is not used.
        self.assertIn("its mode is 0755", self.place.run("ps").stderr)
        self.place.sockets.chmod(0o700)
        # Root attaches a job of somebody else's.
        other = subprocess.Popen([*nobody, "env", f"LD_PRELOAD={PROBE}", "RANK=0", "WORLD_SIZE=1", "FORKPOINT_SOCKETS=/tmp/forkpoint-test-65534",
                                  TRAINER, "10000000", "--pause", "5"], env={})
        self.place.jobs.append(other)
        self.addCleanup(lambda: subprocess.run(["rm", "-rf", "/tmp/forkpoint-test-65534"]))
        runs = self.place.path / "runs"
        runs.mkdir(mode=0o755)
        attached = self.place.await_(lambda: self.place.run("attach", other.pid, "-o", runs / "theirs", "--steps", 2),
                                     lambda done: done.returncode == 0, "root's attach")
        self.assertEqual(self.place.steps_of(runs / "theirs")[0][2:], (2, "whole"), attached.stderr)

    def test_clients_that_talk_nonsense_do_not_disturb_the_job(self):
        job = self.place.start_trainers(1)[0]
        path = str(next(self.place.sockets.glob("*.sock")))
        fuzz = random.Random(7)
        good = [b"forkpoint 1 status\n", b"forkpoint 1 listen\nlevel=step\n", b"forkpoint 1 arm\nfirst=5\nlast=3\nrun=/x\n", b"forkpoint 1 go\n",
                b"forkpoint 1 end_at\nstep=-1\n", b"forkpoint 2 status\n", b"forkpoint 1 abort\n", b"forkpoint 99999999999 x\n"]

        def connect():
            client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            client.setblocking(False)
            for _ in range(500):
                try:
                    client.connect(path)
                    break
                except BlockingIOError:  # more are on their way than may wait
                    time.sleep(0.01)
            client.settimeout(5)
            return client

        for i in range(1000):
            client = connect()
            message = bytearray(fuzz.choice(good))
            if i % 3 == 0:
                message = bytearray(fuzz.randbytes(fuzz.randrange(1, 300)))
            elif i % 3 == 1:
                message = message[:fuzz.randrange(1, len(message))]
                message[fuzz.randrange(len(message))] = fuzz.randrange(256)
            client.send(bytes(message))
            if i % 2:
                try:
                    client.recv(20000)
                except OSError:
                    pass
            client.close()
        large = connect()
        large.send(b"forkpoint 1 status\n" + b"x=" + b"y" * 60000 + b"\n")
        many = [connect() for _ in range(60)]  # more than it has places for
        threads = threads_of(job.pid)
        for client in [large, *many]:
            client.close()
        self.assertEqual(threads.count("forkpoint-agent"), 1)
        self.check_asleep([job])
        done = self.place.attach("--steps", 2)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(self.place.stderr(), "")


class Sleepers(Test):
    def test_shells_and_pythons_without_torch_have_no_thread_and_no_socket(self):
        shell = self.place.start("bash", "-c", "read -t 60 < <(sleep 60); true")
        python = self.place.start("python3", "-c", "import time, json, subprocess\ntime.sleep(60)")
        time.sleep(1.5)
        for job in (shell, python):
            self.assertIsNone(job.poll())
            self.assertEqual(len(threads_of(job.pid)), 1)
            self.assertNotIn("socket:", " ".join(os.readlink(f) for f in pathlib.Path(f"/proc/{job.pid}/fd").iterdir()))
        self.assertFalse(self.place.sockets.exists())
        # The test can tell: a trainer has both.
        self.assertIn("forkpoint-agent", threads_of(self.place.start_trainers(1)[0].pid))

    def test_a_job_that_has_ended_is_not_listed_and_its_socket_goes(self):
        jobs = self.place.start_trainers(2)
        jobs[0].kill()
        jobs[0].wait()
        self.assertEqual(len(list(self.place.sockets.glob("*.sock"))), 2, "nobody tidies up behind SIGKILL")
        self.assertEqual([j["pid"] for j in self.place.ps()], [jobs[1].pid])
        self.assertEqual(len(list(self.place.sockets.glob("*.sock"))), 1)
        short = self.place.start(TRAINER, 3, RANK="0")
        self.assertEqual(short.wait(timeout=30), 0)
        self.assertEqual(len(list(self.place.sockets.glob("*.sock"))), 1, "one that ends by itself does")

    def test_a_run_of_the_sleeping_job_is_what_it_is_without_the_probe(self):
        command = [MINIGPT, "--ranks", "2", "--steps", "30", "--layers", "1", "--dim", "8", "--heads", "1", "--seq", "8", "--batch", "1"]
        alone = subprocess.run(command, capture_output=True, text=True, env=self.place.environment())
        asleep = self.place.run("run", "--", *command)
        self.assertEqual((asleep.returncode, asleep.stdout, asleep.stderr), (alone.returncode, alone.stdout, alone.stderr))
        self.assertEqual(self.place.run("run", "--", "sh", "-c", "exit 7").returncode, 7)


if __name__ == "__main__":
    unittest.main(verbosity=2)
