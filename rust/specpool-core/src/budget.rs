//! The budget (docs/budget.md): what each row's draft may give, and which shape each row of a round gets. Pure
//! functions over plain arrays. They never see a page, only how many each choice needs.

pub mod acceptance;
pub mod choose;
