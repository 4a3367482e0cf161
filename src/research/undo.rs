//! Taking the last step back.

use crate::process::Interruption;
use crate::research::decision::Status;
use crate::research::experiment::Experiment;
use crate::research::ledger::Record;
use crate::research::study::{EDITABLE, Study, short};
use anyhow::{Result, bail, ensure};

/// Takes an unfinished experiment back, or else the last kept one; says what was done.
///
/// # Errors
/// If there is nothing to take back, the work tree has an edit that would be lost, or git fails.
pub fn undo(study: &Study, interruption: &Interruption) -> Result<String> {
    if let Some(experiment) = Experiment::resume(study, interruption)? {
        experiment.take_back()?;
        return Ok("the unfinished experiment is taken back; its edit is in the work tree".to_owned());
    }
    let kept = study.kept()?;
    let records = study.ledger.records(&study.tag)?;
    // Undone already if a crash came between the ledger and the branch.
    let at_kept = |status| status == Status::Keep || status == Status::Undone;
    let is_last = |record: &&Record| record.commit == kept && record.commit != record.parent && at_kept(record.status);
    let Some(record) = records.iter().rev().find(is_last) else {
        bail!("undo: expected a kept experiment, found the branch at its start; hint: `log` shows what was done");
    };
    let repository = &study.repository;
    // Each step may have been done before a crash.
    let head = repository.require_commit("HEAD")?;
    let mut is_clean = head == kept || head == record.parent;
    for name in EDITABLE {
        is_clean &= repository.is_as_in(&kept, name)? || repository.is_as_in(&record.parent, name)?;
    }
    ensure!(
        is_clean,
        "undo: expected the branch at the kept commit {} without an edit, found one; hint: `git stash` puts an edit aside",
        short(&kept)
    );
    if record.status == Status::Keep {
        let time = chrono::Local::now().to_rfc3339_opts(chrono::SecondsFormat::Secs, false);
        study.ledger.undo(record, time)?;
    }
    repository.restore(&record.parent, &EDITABLE)?;
    repository.set_reference(&study.branch_reference(), &record.parent, Some(&head), "autoresearch: undo")?;
    repository.set_reference(&study.reference("kept"), &record.parent, Some(&kept), "autoresearch: undo")?;
    Ok(format!(
        "{} is taken back; {} is at {} again, and its commit stays as {}",
        record.id(),
        study.branch(),
        short(&record.parent),
        study.reference(&record.number.to_string())
    ))
}
