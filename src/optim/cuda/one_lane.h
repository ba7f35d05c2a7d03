/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file one_lane.h
 * lanes.h for one element at a time: a thread of a card, which is a lane by itself. Each function gives what that of
 * lanes.h gives in each lane.
 *
 * What includes this has defined MSC__CORE, how a function of the card is declared, and MSC__SQRT.
 */
#ifndef MSC_OPTIM_ONE_LANE_H
#define MSC_OPTIM_ONE_LANE_H

#include "optim/convert_core.h"

typedef float msc__lanes;
typedef uint32_t msc__ulanes;

#define MSC__LANE_INLINE MSC__CORE

MSC__CORE msc__ulanes msc__lane_bits(msc__lanes x)
{
    return msc__bits(x);
}

MSC__CORE msc__lanes msc__lane_floats(msc__ulanes bits)
{
    return msc__float(bits);
}

/** -limit to limit; a NaN stays one. */
MSC__CORE msc__lanes msc__clamp(msc__lanes x, float limit)
{
    x = x > limit ? limit : x;
    return x < -limit ? -limit : x;
}

/** The limit for a NaN, too. */
MSC__CORE msc__lanes msc__at_most(msc__lanes x, float limit)
{
    return x < limit ? x : limit;
}

MSC__CORE msc__lanes msc__sqrt(msc__lanes x)
{
    return MSC__SQRT(x);
}

MSC__CORE msc__ulanes msc__larger(msc__ulanes a, msc__ulanes b)
{
    return a > b ? a : b;
}

MSC__CORE msc__ulanes msc__smaller(msc__ulanes a, uint32_t b)
{
    return a < b ? a : b;
}

/** a / b, and 0 where b is. */
MSC__CORE msc__lanes msc__ratio(msc__lanes a, msc__lanes b)
{
    return b > 0.0f ? a / b : 0.0f;
}

/** A code with its sign in all upper bits. */
MSC__CORE msc__ulanes msc__signed_byte(uint8_t code)
{
    return ((uint32_t)code ^ 0x80u) - 0x80u;
}

#endif /* MSC_OPTIM_ONE_LANE_H */
