"""What the tests share: servers, nodes and hosts to test against, attackers, corpora, timing."""
