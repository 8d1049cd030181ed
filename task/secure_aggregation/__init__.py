"""Sums over clients that the server cannot take apart (Bonawitz et al. 2017, for a server that keeps to the protocol).

A round has n clients and a threshold t, n / 2 < t <= n. Client u has two key pairs, one for sealing shares and one for
masks, and a random seed b_u, all for this round only. Four messages go to the clients:

1. keys. The server sends nothing; u answers its two public keys.
2. shares. The server sends the keys of U1, all that answered; u answers, sealed for each v of U1 alone, a share of b_u
   and one of its private mask key, t of which give the secret.
3. train. The server sends the round's usual message and U2, whose shares came; u answers
   x_u + PRG(b_u) + sum over v of U2 of sign(u, v) PRG(s_uv), modulo 2^64.
4. unmask. The server sends U3, whose sums came, and the shares that were sealed for u; u answers of each v of U3 the
   share of b_v, of each other v of U2 the share of its mask key.

s_uv is what the mask keys of u and v agree on, and sign(u, v) = -sign(v, u): these masks cancel between clients of U3.
From t answers the server gets b_v of U3, and s_uv of those that were lost, and takes these masks off. What stays is the
sum of x_u over U3. A client answers each message once and in this order. What it remembers (which message is next,
keys, seed, U1, U2) is gone after the last one, and after any message that is out of order.
"""
