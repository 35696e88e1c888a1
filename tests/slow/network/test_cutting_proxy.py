"""Each way in which a process of a job can die or fail, in one job."""

from slow.network.cutting_proxy import FAULTS, Job, Plan


def test_a_job_with_cuts_kills_and_full_disks_uses_each_sample_once(tmp_path):
    """Killed are the data node, the scheduler and a worker; the disks of the scheduler and of a worker are full."""
    moments = {fault: 0.3 + 0.5 * number for number, fault in enumerate(FAULTS)}
    job = Job(tmp_path, Plan(workers=3, cut_rate=0.15, data_cut_rate=0.1, moments=moments)).run()
    assert job.faults == [] and sum(job.cuts.values()) > 0
