//! The probability of a text under a grammar, found by parsing it: nothing that the generator noted is used.

use std::rc::Rc;

use super::grammar::{Choice, Grammar, Node, RowId};

/// All ways in which a grammar makes a text.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Derivations {
    /// How many there are.
    pub count: usize,
    /// −ln of the sum of their probabilities; infinite where there are none.
    pub nats: f64,
}

/// What a derivation must make to be counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Goal {
    /// Exactly the text.
    Whole,
    /// Any text that begins with it; derivations that part only after its last byte count as one or several,
    /// so that `count` means little, while the sum of probabilities is exact.
    Beginning,
}

/// A list that shares its tail with others, since derivations part and have the same past and the same future.
type List<T> = Option<Rc<Cell<T>>>;

struct Cell<T> {
    first: T,
    rest: List<T>,
}

fn push<T>(first: T, rest: List<T>) -> List<T> {
    Some(Rc::new(Cell { first, rest }))
}

/// A derivation that agrees with the text so far.
#[derive(Clone)]
struct State<'g> {
    /// Bytes of the text made.
    at: usize,
    nats: f64,
    /// What is to be made, next first.
    pending: List<&'g Node>,
    /// What the variables hold, newest first.
    held: List<(usize, RowId)>,
}

impl State<'_> {
    fn held(&self, variable: usize) -> RowId {
        let mut cell = self.held.as_ref();
        while let Some(Cell { first, rest }) = cell.map(Rc::as_ref) {
            if first.0 == variable {
                return first.1;
            }
            cell = rest.as_ref();
        }
        panic!("a checked grammar fills a variable before it uses it");
    }
}

/// Parses `text` from left to right, following every derivation that agrees with it.
pub fn derivations(grammar: &Grammar, text: &str, goal: Goal) -> Derivations {
    let mut parser = Parser { grammar, text, goal, agenda: Vec::new(), found: Vec::new() };
    let start = State { at: 0, nats: 0.0, pending: None, held: None };
    parser.choose(&start, &grammar.rules[grammar.root]);
    while let Some(state) = parser.agenda.pop() {
        parser.step(state);
    }
    Derivations { count: parser.found.len(), nats: nats_of_sum(&parser.found) }
}

struct Parser<'g, 't> {
    grammar: &'g Grammar,
    text: &'t str,
    goal: Goal,
    agenda: Vec<State<'g>>,
    /// −ln of the probability of each derivation that reached the goal.
    found: Vec<f64>,
}

impl<'g> Parser<'g, '_> {
    fn step(&mut self, mut state: State<'g>) {
        let Some(cell) = state.pending.take() else {
            if state.at == self.text.len() {
                self.found.push(state.nats);
            }
            return;
        };
        state.pending.clone_from(&cell.rest);
        let grammar = self.grammar;
        match cell.first {
            Node::Literal(literal) => self.read(state, literal),
            Node::Choice(choice) => self.choose(&state, choice),
            Node::Rule(rule) => self.choose(&state, &grammar.rules[*rule]),
            Node::Use { variable, form } => {
                let spoken = grammar.row(state.held(*variable)).say(*form);
                self.read(state, spoken);
            }
            Node::Dispatch { variable, attribute, rules } => {
                let value = grammar.row(state.held(*variable)).value(*attribute);
                self.choose(&state, &grammar.rules[rules[value]]);
            }
            Node::Draw { table, variable, except, form } => {
                let weights = &grammar.tables[*table].weights;
                let left_out =
                    except.map(|other| state.held(other)).filter(|(other, _)| other == table).map(|(_, row)| row);
                let saved = left_out.map_or(0.0, |row| weights.nats_without(row));
                for (row, content) in grammar.tables[*table].rows.iter().enumerate() {
                    if left_out == Some(row) {
                        continue;
                    }
                    let mut next = state.clone();
                    next.nats += weights.nats[row] - saved;
                    if let Some(variable) = variable {
                        next.held = push((*variable, (*table, row)), next.held);
                    }
                    self.read(next, content.say(*form));
                }
            }
        }
    }

    fn choose(&mut self, state: &State<'g>, choice: &'g Choice) {
        for (index, alternative) in choice.alternatives.iter().enumerate() {
            let mut next = state.clone();
            next.nats += choice.weights.nats[index];
            for node in alternative.iter().rev() {
                next.pending = push(node, next.pending);
            }
            self.agenda.push(next);
        }
    }

    fn read(&mut self, mut state: State<'g>, piece: &str) {
        let rest = &self.text.as_bytes()[state.at..];
        if rest.starts_with(piece.as_bytes()) {
            state.at += piece.len();
            self.agenda.push(state);
        } else if self.goal == Goal::Beginning && piece.as_bytes().starts_with(rest) {
            self.found.push(state.nats);
        }
    }
}

/// −ln Σ exp(−nats), safe for probabilities too small for a float.
fn nats_of_sum(nats: &[f64]) -> f64 {
    let least = nats.iter().copied().fold(f64::INFINITY, f64::min);
    if least.is_infinite() {
        return least;
    }
    least - nats.iter().map(|n| (least - n).exp()).sum::<f64>().ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn toy(source: &str) -> Grammar {
        Grammar::parse(source, "text").expect("a toy grammar is right")
    }

    fn close(found: f64, probability: f64) {
        assert!((found.exp() * probability - 1.0).abs() < 1e-12, "{} instead of {probability}", (-found).exp());
    }

    #[test]
    fn an_ambiguous_text_has_the_sum_of_its_derivations() {
        let grammar = toy("rule text\n  - (a|aa)(a|2*aa)");
        let both = derivations(&grammar, "aaa", Goal::Whole);
        assert_eq!(both.count, 2);
        // a and aa: 1/2 · 2/3; aa and a: 1/2 · 1/3.
        close(both.nats, 0.5);
        let one = derivations(&grammar, "aa", Goal::Whole);
        assert_eq!(one.count, 1);
        close(one.nats, 1.0 / 6.0);
    }

    #[test]
    fn the_probabilities_of_all_texts_add_up_to_one() {
        let grammar = toy(
            "table colour\n  red, green, blue\nrule text\n  - 2* {one := colour}{colour but not one}\n  - {one := colour}{one}",
        );
        let colours = ["red", "green", "blue"];
        let mut total = 0.0;
        for one in colours {
            for two in colours {
                total += (-derivations(&grammar, &format!("{one}{two}"), Goal::Whole).nats).exp();
            }
        }
        assert!((total - 1.0).abs() < 1e-12, "{total}");
    }

    #[test]
    fn a_beginning_has_the_probability_of_all_that_follows() {
        let grammar = toy("rule text\n  - a(b|3*c)(d|e)\n  - x");
        close(derivations(&grammar, "", Goal::Beginning).nats, 1.0);
        close(derivations(&grammar, "a", Goal::Beginning).nats, 0.5);
        close(derivations(&grammar, "ac", Goal::Beginning).nats, 0.375);
        close(derivations(&grammar, "ace", Goal::Beginning).nats, 0.1875);
        assert_eq!(derivations(&grammar, "ad", Goal::Beginning).count, 0);
    }

    #[test]
    fn a_probability_too_small_for_a_float_still_has_nats() {
        let nats = nats_of_sum(&[2_000.0, 2_000.0]);
        assert!((nats - (2_000.0 - std::f64::consts::LN_2)).abs() < 1e-9);
        assert!(nats_of_sum(&[]).is_infinite());
    }
}
