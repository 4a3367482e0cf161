//! A recorded loop with a scripted agent.

use super::Study;
use serde_json::Value;
use std::fs;

/// An agent that does something else each time: the last lets the loop end.
const AGENT: &str = r#"
cat > prompt.txt
round=$(($(cat ../round 2>/dev/null || echo 0) + 1))
echo $round > ../round
cp prompt.txt ../prompt-$round.txt && rm prompt.txt
change() { sed -i "0,/$1/s//$2/" src/model.rs; }
case $round in
1) change 'total_batch_size: 1 << 8' 'total_batch_size: 1 << 9'; echo 'EXPERIMENT: twice the batch';;
2) change 'matrix_lr: 0.04' 'matrix_lr: 0.8'; echo 'EXPERIMENT: huge steps';;
3) change 'const SOFTCAP: f64 = 15.0;' 'const SOFTCAP: f64 = "fifteen";'; echo 'EXPERIMENT: no number';;
4) change 'matrix_lr: 0.04' 'matrix_lr: f64::NAN'; echo 'EXPERIMENT: no number either';;
5) change 'let \[_, t\] = tokens.dims();' 'let [_, t] = tokens.dims(); while t > 0 {}'; echo 'EXPERIMENT: a hang';;
6) echo '// shrunk' >> src/eval.rs; echo 'EXPERIMENT: out of bounds';;
7) git restore src/eval.rs; exit 3;;
8) sleep 1000;;
9) echo nothing to do;;
10) change 'tokens: Tensor<2, Int>) -> Tensor<3> {' 'tokens: Tensor<2, Int>) -> Tensor<3> { let tokens = Tensor::cat(vec![tokens.clone().slice([0..tokens.dims()[0], 1..tokens.dims()[1]]), tokens.clone().slice([0..tokens.dims()[0], 0..1])], 1);'
    echo 'EXPERIMENT: looks ahead';;
*) exit 4;;
esac
"#;

#[test]
fn a_loop_with_an_agent_that_does_everything_wrong_keeps_the_one_gain() {
    let study = Study::start("loop", "40");
    fs::write(study.path("notes.txt"), "the user's own").unwrap();
    fs::write(study.checkout.path().parent().unwrap().join("agent.sh"), AGENT).unwrap();
    fs::remove_file(study.checkout.path().parent().unwrap().join("round")).ok();
    let start = study.head();

    let looped = study.ok(&["loop", "--agent", "sh ../agent.sh", "--experiments", "6", "--agent-limit", "0.25"]);

    let statuses: Vec<String> = study.rows().into_iter().map(|(status, words)| format!("{status}: {words}")).collect();
    assert_eq!(
        statuses,
        [
            "keep: baseline",
            "keep: twice the batch",
            "discard: huge steps",
            "crash: no number",
            "crash: no number either",
            "crash: a hang",
            "crash: looks ahead"
        ],
        "{}",
        looped.stdout
    );
    let records = study.records();
    let kinds: Vec<&str> = records.iter().filter_map(|record| record["crash"]["kind"].as_str()).collect();
    assert_eq!(kinds, ["build", "nan", "timeout", "dishonest"]);
    let excerpt = records[3]["crash"]["excerpt"].as_str().unwrap();
    assert!(excerpt.contains("mismatched types") && excerpt.lines().count() <= 20, "{excerpt}");
    let table = study.read("results.tsv");
    assert!(table.lines().filter(|row| row.contains("\tcrash\t")).all(|row| row.contains("\t0.000000\t0.0\t")));

    // A build takes the dependencies as the user's own builds left them.
    let log = study.read("runs/loop-001/build.log");
    let compiled: Vec<&str> = log.lines().filter_map(|line| line.trim_start().strip_prefix("Compiling ")).collect();
    assert!(matches!(compiled[..], [one] if one.starts_with("autoresearch ")), "{log}");

    // The branch is at the gain, everything else is reachable and the work tree is clean.
    assert_eq!(records[1]["commit"], study.head());
    assert_eq!(records[1]["parent"], start);
    assert_eq!(study.checkout.git(&["status", "--porcelain"]), "?? notes.txt");
    assert_eq!(study.read("notes.txt"), "the user's own");
    for record in &records {
        let reference = format!("refs/autoresearch/loop/{}", record["number"]);
        assert_eq!(record["commit"], study.checkout.git(&["rev-parse", &reference]));
        let patch = fs::read_to_string(record["patch"].as_str().unwrap()).unwrap();
        assert_eq!(patch.is_empty(), record["number"] == 0, "{patch}");
    }
    assert_eq!(study.checkout.git(&["rev-list", "--count", "main..HEAD"]), "1");

    // What the agent was told, and what the loop wrote of its rounds.
    let prompt = |round: usize| fs::read_to_string(study.path(&format!("../prompt-{round}.txt"))).unwrap();
    assert!(prompt(2).contains("loop-001: keep (gain)"), "{}", prompt(2));
    assert!(prompt(4).contains("| error[E0308]: mismatched types"), "{}", prompt(4));
    assert!(prompt(7).contains("src/eval.rs") && prompt(7).contains("git restore"), "{}", prompt(7));
    assert!(prompt(8).contains("ended with code 3"), "{}", prompt(8));
    assert!(prompt(9).contains("took longer than"), "{}", prompt(9));
    assert!(prompt(10).contains("expected an edit"), "{}", prompt(10));
    let rounds = study.read("runs/loop-loop.jsonl");
    assert_eq!(rounds.lines().count(), 10, "{rounds}");

    // A new loop may begin; the ledger as a table; a comparison.
    assert!(!study.path(".git/autoresearch/branches/loop/loop.json").exists());
    let log = study.ok(&["log", "--best"]).stdout;
    assert!(log.lines().nth(1).unwrap().starts_with("loop-001"), "{log}");
    let comparison = study.ok(&["compare", "0", "loop-001", "--json"]).stdout;
    let comparison: Value = serde_json::from_str(&comparison).unwrap();
    assert!(comparison["sides"][1]["difference"].as_f64().unwrap() < 0.0);
    study.assert_refused(&["compare", "0", "3"], &["loop-003", "a crash"]);
    let status: Value = serde_json::from_str(&study.ok(&["status", "--json"]).stdout).unwrap();
    assert_eq!((status["kept"].clone(), status["crashed"].clone()), (2.into(), 4.into()));

    // What was taken back stays reachable, and what was discarded can be measured again.
    study.ok(&["undo"]);
    assert_eq!(study.head(), start);
    assert_eq!(study.checkout.git(&["status", "--porcelain"]), "?? notes.txt");
    assert_eq!(study.rows()[1].0, "undone");
    study.assert_refused(&["undo"], &["found the branch at its start"]);
    let again = study.ok(&["retry", "1"]).stdout;
    assert!(again.starts_with("experiment loop-007: keep (gain)\ntried:   retry: twice the batch\n"), "{again}");
    assert!(again.lines().count() <= 15, "{again}");
    assert_eq!(records[1]["commit"], study.head());
    assert_eq!(study.records().last().unwrap()["val_bpb"], records[1]["val_bpb"]);
}
