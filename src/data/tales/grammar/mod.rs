//! A probabilistic grammar as data: read from text, checked as a whole, expanded into a text with its exact probability.

mod check;
mod read;

use anyhow::{Context, Result};
use chacha20::ChaCha8Rng;
use check::Check;
use rand::Rng;
use read::Reader;
use rustc_hash::FxHashMap;

/// The forms that every row of a table has without naming them: itself, and itself after "a" or "an".
const NAME: usize = 0;
const WITH_ARTICLE: usize = 1;

/// A grammar in which no rule reaches itself, so that every derivation ends.
///
/// The notation is described at the head of `tales.grammar`.
#[derive(Debug)]
pub struct Grammar {
    pub(super) rules: Vec<Choice>,
    pub(super) tables: Vec<Table>,
    pub(super) root: usize,
    variables: usize,
}

/// One thing that a text is made of.
#[derive(Debug)]
pub(super) enum Node {
    Literal(String),
    Choice(Choice),
    Rule(usize),
    /// Draws a row of a table, not the one held by `except`, keeps it in `variable`, and says it in a form.
    Draw {
        table: usize,
        variable: Option<usize>,
        except: Option<usize>,
        form: Form,
    },
    /// Says the row that a variable holds.
    Use {
        variable: usize,
        form: Form,
    },
    /// Goes on with the rule that an attribute of a variable's row names.
    Dispatch {
        variable: usize,
        attribute: usize,
        rules: FxHashMap<String, usize>,
    },
}

/// Alternatives, each a sequence of nodes, and how likely they are.
#[derive(Debug)]
pub(super) struct Choice {
    pub(super) weights: Weights,
    pub(super) alternatives: Vec<Vec<Node>>,
}

/// Integer weights: a choice is then exact and the same on every machine.
#[derive(Debug)]
pub(super) struct Weights {
    /// `ends[i]` is the sum of the weights up to and including `i`.
    ends: Vec<u64>,
    /// −ln of each probability.
    pub(super) nats: Vec<f64>,
}

#[derive(Debug)]
pub(super) struct Table {
    pub(super) weights: Weights,
    pub(super) rows: Vec<Row>,
}

/// What can be said of one row, by attribute; each as written and with a capital letter.
#[derive(Debug)]
pub(super) struct Row(Vec<Option<[String; 2]>>);

/// Which attribute of a row is said, and whether with a capital letter.
#[derive(Debug, Clone, Copy)]
pub(super) struct Form {
    attribute: usize,
    capital: bool,
}

/// A row, by the numbers of its table and of itself.
pub(super) type RowId = (usize, usize);

/// A text that a grammar made, and its information content.
#[derive(Debug, Clone, PartialEq)]
pub struct Story {
    /// The text.
    pub text: String,
    /// −ln of the probability of the choices that made it.
    pub nats: f64,
}

impl Weights {
    fn new(weights: &[u64]) -> Self {
        let total = weights.iter().sum::<u64>() as f64;
        let ends = weights
            .iter()
            .scan(0, |end, weight| {
                *end += weight;
                Some(*end)
            })
            .collect();
        let nats = weights.iter().map(|&weight| (total / weight as f64).ln()).collect();
        Self { ends, nats }
    }

    fn start(&self, index: usize) -> u64 {
        if index == 0 { 0 } else { self.ends[index - 1] }
    }

    fn weight(&self, index: usize) -> u64 {
        self.ends[index] - self.start(index)
    }

    fn total(&self) -> u64 {
        self.ends[self.ends.len() - 1]
    }

    /// What leaving out one alternative takes off the information content of each other one.
    pub(super) fn nats_without(&self, left_out: usize) -> f64 {
        let total = self.total() as f64;
        (total / (total - self.weight(left_out) as f64)).ln()
    }

    fn draw(&self, rng: &mut ChaCha8Rng) -> usize {
        let at = below(self.total(), rng);
        self.ends.partition_point(|&end| end <= at)
    }

    fn draw_without(&self, left_out: usize, rng: &mut ChaCha8Rng) -> usize {
        let mut at = below(self.total() - self.weight(left_out), rng);
        if at >= self.start(left_out) {
            at += self.weight(left_out);
        }
        self.ends.partition_point(|&end| end <= at)
    }
}

/// A number below `total`, written out because the crates' own methods may give other values in another version.
/// Totals are below 2^32, so no number is more than 2^-32 more likely, relatively, than another.
fn below(total: u64, rng: &mut ChaCha8Rng) -> u64 {
    ((u128::from(rng.next_u64()) * u128::from(total)) >> 64) as u64
}

impl Row {
    fn get(&self, form: Form) -> Option<&str> {
        let spoken = self.0.get(form.attribute)?.as_ref()?;
        Some(&spoken[usize::from(form.capital)])
    }

    /// The text of a form that the grammar's checks found to be there.
    pub(super) fn say(&self, form: Form) -> &str {
        self.get(form).expect("a checked grammar uses only the attributes that its rows have")
    }

    /// The value of an attribute that the grammar's checks found to be there.
    pub(super) fn value(&self, attribute: usize) -> &str {
        self.say(Form { attribute, capital: false })
    }
}

impl Grammar {
    /// Reads and checks a grammar; `root` is the rule that makes a whole text.
    ///
    /// # Errors
    /// Where the notation is broken, a name is unknown or unused, a variable may be used before it holds a row, an
    /// attribute may be missing, or a rule reaches itself.
    pub fn parse(source: &str, root: &str) -> Result<Self> {
        let mut reader = Reader::default();
        let blocks = reader.declare(source)?;
        let mut rules = Vec::new();
        let mut tables = Vec::new();
        for block in &blocks {
            let place = || format!("line {}, {} `{}`", block.line, block.kind, block.name);
            if block.kind == "rule" {
                rules.push(reader.rule(&block.body).with_context(place)?);
            } else {
                tables.push(reader.table(&block.body).with_context(place)?);
            }
        }
        let root = reader.rule_named(root)?;
        let grammar = Self { rules, tables, root, variables: reader.variables.len() };
        Check::new(&grammar, &reader).run()?;
        Ok(grammar)
    }

    /// Makes one text.
    pub fn generate(&self, rng: ChaCha8Rng) -> Story {
        let mut writer = Writer {
            grammar: self,
            rng,
            held: vec![None; self.variables],
            story: Story { text: String::new(), nats: 0.0 },
        };
        writer.choose(&self.rules[self.root]);
        writer.story
    }

    pub(super) fn row(&self, (table, row): RowId) -> &Row {
        &self.tables[table].rows[row]
    }
}

struct Writer<'g> {
    grammar: &'g Grammar,
    rng: ChaCha8Rng,
    held: Vec<Option<RowId>>,
    story: Story,
}

impl<'g> Writer<'g> {
    fn choose(&mut self, choice: &'g Choice) {
        let index = choice.weights.draw(&mut self.rng);
        self.story.nats += choice.weights.nats[index];
        for node in &choice.alternatives[index] {
            self.write(node);
        }
    }

    fn write(&mut self, node: &'g Node) {
        let grammar = self.grammar;
        match node {
            Node::Literal(literal) => self.story.text.push_str(literal),
            Node::Choice(choice) => self.choose(choice),
            Node::Rule(rule) => self.choose(&grammar.rules[*rule]),
            Node::Draw { table, variable, except, form } => {
                let weights = &grammar.tables[*table].weights;
                // Two variables may hold rows of different tables: then there is nothing to leave out.
                let left_out = except.map(|other| self.held(other)).filter(|(other, _)| other == table);
                let row = if let Some((_, left_out)) = left_out {
                    self.story.nats -= weights.nats_without(left_out);
                    weights.draw_without(left_out, &mut self.rng)
                } else {
                    weights.draw(&mut self.rng)
                };
                self.story.nats += weights.nats[row];
                if let Some(variable) = variable {
                    self.held[*variable] = Some((*table, row));
                }
                self.story.text.push_str(grammar.row((*table, row)).say(*form));
            }
            Node::Use { variable, form } => {
                let row = grammar.row(self.held(*variable));
                self.story.text.push_str(row.say(*form));
            }
            Node::Dispatch { variable, attribute, rules } => {
                let value = grammar.row(self.held(*variable)).value(*attribute);
                self.choose(&grammar.rules[rules[value]]);
            }
        }
    }

    fn held(&self, variable: usize) -> RowId {
        self.held[variable].expect("a checked grammar fills a variable before it uses it")
    }
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;

    use super::*;

    #[test]
    fn texts_come_as_often_as_their_probability_says() {
        let grammar = Grammar::parse(
            "table colour\n  red, green, blue, grey\nrule text\n  - 3* {one := colour} {colour but not one}\n  - {colour.an}",
            "text",
        )
        .expect("a toy grammar is right");
        let mut counts: FxHashMap<String, (u32, f64)> = FxHashMap::default();
        let draws = 100_000;
        for seed in 0..draws {
            let story = grammar.generate(ChaCha8Rng::seed_from_u64(seed));
            let (count, nats) = counts.entry(story.text).or_insert((0, story.nats));
            *count += 1;
            assert_eq!(*nats, story.nats);
        }
        assert_eq!(counts.len(), 12 + 4);
        for (text, (count, nats)) in counts {
            let expected = (-nats).exp() * draws as f64;
            let deviations = (f64::from(count) - expected) / expected.sqrt();
            assert!(deviations.abs() < 4.5, "`{text}` {count} times instead of {expected}");
        }
    }

    #[test]
    fn capitals_articles_and_attributes_agree() {
        let grammar = Grammar::parse(
            "table animal\n  : cry=Hoo\n  owl\n  : cry=Moo\n  cow\nrule text\n  - {^who := animal.an} [says/who.cry] ¶ {who}\nrule says/Hoo\n  - hoots.\nrule says/Moo\n  - moos.",
            "text",
        )
        .expect("a toy grammar is right");
        for seed in 0..20 {
            let text = grammar.generate(ChaCha8Rng::seed_from_u64(seed)).text;
            assert!(["An owl hoots.\n\nowl", "A cow moos.\n\ncow"].contains(&text.as_str()), "{text}");
        }
    }

    #[test]
    fn a_wrong_grammar_is_refused_with_the_place_and_a_hint() {
        let table = "table colour\n  red, blue\n";
        for (source, place) in [
            ("rule text\n  - [tail]".to_owned(), "`tail`"),
            ("rule text\n  - a [text]".to_owned(), "inside itself"),
            (format!("{table}rule text\n  - a"), "`colour` unused"),
            (format!("{table}rule text\n  - {{hue}} {{hue := colour}}"), "`hue`"),
            (format!("{table}rule text\n  - (|{{hue := colour}}) {{hue}}"), "`hue`"),
            (format!("{table}rule text\n  - {{colour.size}}"), "`size`"),
            (format!("{table}rule text\n  - {{hue := colour}} [b/hue.name]\nrule b/red\n  - a"), "`blue`"),
            (format!("{table}rule text\n  - {{colour := colour}}"), "name of its own"),
            ("table colour\n  red, red\nrule text\n  - a".to_owned(), "twice"),
            ("table colour\n  red\nrule text\n  - a".to_owned(), "line 1"),
            ("rule text\n  - (a|b".to_owned(), "`)`"),
            ("rule text\n  - a)".to_owned(), "`(`"),
            ("rule text\n  - 0* a".to_owned(), "weight"),
            ("rule text\n  a".to_owned(), "`- `"),
            ("rules text\n  - a".to_owned(), "line 1"),
            ("rule text\n  - a\nrule text\n  - b".to_owned(), "line 3"),
            ("rule other\n  - a".to_owned(), "`text`"),
        ] {
            let message = match Grammar::parse(&source, "text") {
                Ok(_) => panic!("accepted: {source}"),
                Err(error) => format!("{error:#}"),
            };
            assert!(
                message.contains(place) && message.contains("; hint: ") && !message.contains('\n'),
                "{source}\n{message}"
            );
        }
    }
}
