//! The walk of verify.

use specpool_core::tree::build::Tree;
use specpool_core::tree::verify::verify_tree;

#[test]
fn walks_to_the_first_equal_child() {
    let tree = Tree::from_parents(&[-1, 0, 0, 2], 4).unwrap();
    let walk = |target: &[i64], steps| {
        verify_tree(&[9, 5, 6, 7], &tree.first_child, &tree.next_sibling, target, 4, steps).unwrap()
    };
    let verified = walk(&[6, 0, 7, 8], 3);
    assert_eq!((verified.accept_index, verified.accept_len), (vec![0, 2, 3, -1], vec![3]));
    assert_eq!(verified.predict, [6, 0, 7, 8]);
    assert_eq!(walk(&[6, 0, 7, 8], 1).accept_index, [0, 2]);
    assert_eq!(walk(&[1, 0, 7, 8], 0).predict, [1, 0, 0, 0]);
    assert_eq!(walk(&[6, 0, -1, 8], 3).predict, [6, 0, -1, 0]);
}

#[test]
fn links_only_lead_forwards() {
    let error = verify_tree(&[1, 1], &[1, 1], &[-1, -1], &[1, 1], 2, 3).unwrap_err();
    assert_eq!(error.to_string(), "first_child[0, 1] must be -1 or in (1, 2), got 1");
    let error = verify_tree(&[1, 1], &[1], &[-1, -1], &[1, 1], 2, 3).unwrap_err();
    assert_eq!(error.to_string(), "first_child must have 2 elements, got 1");
}
